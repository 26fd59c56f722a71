// Light, dark, or as the system is; the choice stays in this browser.

import { h, say } from "./dom.js";

const KEY = "agrpo.theme";
const NEXT = { system: "dark", dark: "light", light: "system" };
const listeners = new Set();

const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", tell);

function chosen() {
  return localStorage.getItem(KEY) ?? "system";
}

function apply() {
  if (chosen() === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen();
  tell();
}

function tell() {
  for (const listener of listeners) listener();
}

/** Called whenever the colours have changed: canvases do not change by themselves. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The value of a colour of theme.css at this moment. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function themeSwitch() {
  const button = h("button", { type: "button", id: "theme" });
  const show = () => {
    say(button, `Theme: ${chosen()}`);
    button.title = `Switch to ${NEXT[chosen()]}`;
  };
  button.addEventListener("click", () => {
    localStorage.setItem(KEY, NEXT[chosen()]);
    apply();
    show();
  });
  show();
  return button;
}

apply();
