// Build elements. Text only ever enters the page as text: names and log lines may contain markup.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. `props`: attributes, `on` for listeners, `style` for properties; children are nodes or text. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

/** Append nodes and texts; null and false are left out. */
export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** Replace the children of an element, but only if they differ: nothing flickers, and the focus stays. */
export function put(element, ...children) {
  const wanted = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  const same = element.childNodes.length === wanted.length && wanted.every((child, index) => element.childNodes[index] === child);
  if (!same) element.replaceChildren(...wanted);
  return element;
}

/** Return a function that runs `action` once things have been quiet for a while. */
export function later(action, milliseconds) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), milliseconds);
  };
}

/** A message at the bottom of the page, for a few seconds. */
export function notify(text, isProblem = false) {
  const host = document.getElementById("notices");
  const notice = h("div", { class: isProblem ? "notice problem" : "notice" }, text);
  host.append(notice);
  setTimeout(() => notice.remove(), isProblem ? 8000 : 3000);
}

/** Ask a question; resolves to whether the answer is yes. */
export function confirmed(title, text, verb) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { "aria-label": title },
      h("h2", null, title),
      h("p", null, text),
      h(
        "div",
        { class: "row end" },
        h("button", { autofocus: true, on: { click: () => dialog.close("") } }, "Leave it"),
        h("button", { class: "danger", on: { click: () => dialog.close("yes") } }, verb),
      ),
    );
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

export async function copy(text) {
  await navigator.clipboard.writeText(text);
  notify("Copied");
}
