// Browsers start no worker for a page that is opened as a file, and the search runs in one.
// There, a hidden frame takes the worker's place: the same messages, the same script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      const inner = frame.contentWindow
      inner.document.open()
      inner.document.write("<!doctype html><html><head></head></html>")
      inner.document.close()
      inner.postMessage = data => setTimeout(() => {
        const message = new MessageEvent("message", { data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      inner.importScripts = (...urls) => Promise.all(urls.map(each => this.load(inner, each)))
      this.load(inner, url).then(() => {
        this.inner = inner
        for (const data of this.waiting.splice(0)) this.postMessage(data)
      })
    }

    load(inner, url) {
      return new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = new URL(url, document.baseURI).href
        script.onload = resolve
        script.onerror = reject
        inner.document.head.appendChild(script)
      })
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }))
      else this.waiting.push(data)
    }

    terminate() {}
  }
}
