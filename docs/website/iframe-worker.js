// Search from a disk: browsers refuse Web Workers to pages that are opened as files, so the worker's script runs in a
// hidden frame. Only what the site's search uses is here: onmessage, onerror, postMessage, terminate.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.frame.addEventListener("load", () => this.start(address), { once: true });
      document.body.append(this.frame);
    }

    start(address) {
      const scope = this.frame.contentWindow;
      if (!scope) return;
      // In a worker, postMessage speaks to the page; in a frame it would speak to itself.
      scope.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = scope.document.createElement("script");
      script.src = address;
      script.onerror = (event) => this.onerror?.(event);
      script.onload = () => {
        this.scope = scope;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      };
      scope.document.body.append(script);
    }

    postMessage(data) {
      if (this.scope) this.scope.onmessage?.({ data });
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
