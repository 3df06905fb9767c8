// Light and dark: what the system prefers, or what the reader has chosen.

import { h } from "./dom.js";

const CHOICES = { auto: "System colours", light: "Light", dark: "Dark" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

/** Call a listener when the colours change; returns a function that ends it. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The button that goes through the choices. */
export function themeButton() {
  const button = h("button", { class: "plain theme", on: { click: () => choose(next(chosen())) } });
  const choose = (choice) => {
    apply(choice);
    button.textContent = SIGNS[choice];
    button.title = CHOICES[choice];
    button.setAttribute("aria-label", `Colours: ${CHOICES[choice]}`);
  };
  choose(chosen());
  system.addEventListener("change", tell);
  return button;
}

/** Return the value of a colour of style.css, such as `accent`. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  if (!probe.isConnected) document.body.append(probe);
  return getComputedStyle(probe).color;
}

const probe = h("span", { hidden: true });

function chosen() {
  try {
    const kept = localStorage.getItem("paceline-theme");
    return kept in CHOICES ? kept : "auto";
  } catch {
    return document.documentElement.dataset.theme || "auto"; // a file may not keep anything
  }
}

function apply(choice) {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  try {
    localStorage.setItem("paceline-theme", choice);
  } catch {
    // it holds until the page is closed
  }
  tell();
}

function next(choice) {
  const names = Object.keys(CHOICES);
  return names[(names.indexOf(choice) + 1) % names.length];
}

function tell() {
  for (const listener of listeners) listener();
}
