import { loadClassifier, startClassifier } from "./classifier";
import { load, startEpisodes } from "./episodes";
import { element, showProblem } from "./dom";
import { latencies } from "./frames";
import { ask, ROLES } from "./protocol";
import { startRobot } from "./robot";
import { loadTraining, startTraining } from "./training";

const PAGES = ["robot", "episodes", "training"];

function showPage(): void {
  const wanted = PAGES.find((page) => location.hash === `#${page}`) ?? "robot";
  for (const page of PAGES) {
    element(page).hidden = page !== wanted;
    const link = element(`link-${page}`);
    if (page === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (wanted === "episodes") void load();
  if (wanted === "training") {
    void loadTraining();
    void loadClassifier();
  }
  scrollTo(0, 0);
}

async function start(): Promise<void> {
  const me = await ask<{ name: string; role: string }>("/api/me");
  element("me").textContent = me.name === me.role ? me.role : `${me.name} (${me.role})`;
  for (const control of document.querySelectorAll<HTMLButtonElement>("[data-needs]")) {
    control.disabled = ROLES.indexOf(me.role) < ROLES.indexOf(control.dataset.needs ?? "");
  }
  element("drive").hidden = me.role !== "operator";
  startEpisodes();
  startRobot();
  startTraining(me.role === "operator");
  startClassifier();
  addEventListener("hashchange", showPage);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("resize"))); // drawn again
  showPage();
}

Object.assign(window, { vlaRlLatencies: latencies });
start().catch((error: unknown) => showProblem(String(error)));
