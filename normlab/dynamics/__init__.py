"""Attention dynamics: simulate token representations through depth as interacting particles on a sphere.

Attention and a scheme's speed law give the velocity of each token (`system/`). An integrator solves the ODE, and
observables such as mean cosine, clusters and effective rank are measured along the trajectory (`measure/`).
`experiments/` compares them with published predictions; `view/` prints tables and writes HTML pages.
"""
