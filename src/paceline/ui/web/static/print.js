// Paper: light colours, a width that fits a sheet, and all parts of a page at once.

const listeners = new Set();
let isPaper = false;
let isPrinting = false; // between the two events; the media may change back and forth meanwhile

/** Whether the page is being laid out for paper. */
export function onPaper() {
  return isPaper;
}

/** Call a listener with true before the page is printed, and with false after it; returns a function that ends it. */
export function onPrint(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function set(isWanted) {
  if (isPaper === isWanted) return;
  isPaper = isWanted;
  document.documentElement.toggleAttribute("data-paper", isPaper);
  for (const listener of listeners) listener(isPaper);
}

window.addEventListener("beforeprint", () => {
  isPrinting = true;
  set(true);
});
window.addEventListener("afterprint", () => {
  isPrinting = false;
  set(false);
});
window.matchMedia("print").addEventListener("change", (event) => {
  if (!isPrinting) set(event.matches);
});
