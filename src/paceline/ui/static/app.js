// The frame of all pages: navigation, addresses (#/run/KEY), colours.

import { clusterPage } from "./cluster.js";
import { comparePage } from "./curves.js";
import { add, h, put } from "./dom.js";
import { date } from "./format.js";
import { empty } from "./parts.js";
import { runPage } from "./run.js";
import { runsPage, sweepsPage } from "./runs.js";
import { about, isReport, onLive } from "./source.js";
import { sweepPage } from "./sweep.js";

const PAGES = { "": runsPage, run: runPage, compare: comparePage, sweep: sweepPage, sweeps: sweepsPage, cluster: clusterPage };
const LINKS = [["#/", "Runs", ["", "run", "compare"]], ["#/sweeps", "Sweeps", ["sweep", "sweeps"]], ["#/cluster", "Cluster", ["cluster"]]];

const content = document.getElementById("content");
const place = h("span", { class: "place" });
const live = h("span", { class: "live", role: "status", hidden: true });
const links = h("nav", { "aria-label": "Pages" }, LINKS.map(([href, text]) => h("a", { href }, text)));
let close = () => {};
let visit = 0;

function start() {
  const home = isReport ? `#/${about.page}` : "#/";
  add(document.getElementById("top"), [
    h("a", { class: "brand", href: home }, "Paceline"),
    isReport ? h("span", { class: "quiet small" }, `Report of ${date(about.time)}`) : links,
    h("span", { class: "spacer" }),
    place,
    live,
  ]);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    content.focus();
  });
  onLive((isLive) => {
    live.hidden = false;
    live.className = isLive ? "live" : "live off";
    live.textContent = isLive ? "Live" : "Reconnecting";
  });
  window.addEventListener("hashchange", () => show());
  if (isReport && !location.hash.startsWith("#/")) history.replaceState(null, "", home);
  show();
}

async function show() {
  const [page, argument, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  close();
  close = () => {};
  visit += 1;
  const now = visit;
  live.hidden = true;
  links.querySelectorAll("a").forEach((link, index) => {
    if (LINKS[index][2].includes(page)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  const host = h("div");
  const waits = setTimeout(() => put(content, h("p", { class: "empty" }, "Reading …")), 250);
  try {
    const make = PAGES[page];
    if (!make) throw new Error("There is no such page.");
    const end = await make(host, (text) => { place.textContent = text; place.title = text; }, argument || "", rest.map(decodeURIComponent));
    if (now !== visit) {
      end?.(); // the reader has left meanwhile
      return;
    }
    close = end || close;
    put(content, host);
    document.title = `${content.querySelector("h1")?.textContent || "Paceline"} · Paceline`;
  } catch (problem) {
    if (now !== visit) return;
    put(content, empty("This page can't be shown", problem.message));
    if (!problem.status) console.warn(problem.stack || problem.message);
  } finally {
    clearTimeout(waits);
  }
}

start();
