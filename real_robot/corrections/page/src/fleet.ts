// The page of a fleet: its robots, who needs help most first; their policies, and rolling them back.

import { element, onClick, setText, showProblem } from "./dom";
import { ask, ROLES } from "./protocol";

interface Robot {
  name: string;
  mode: "policy" | "human" | "hold" | "ended";
  reason: string;
  task: string;
  episode: number;
  person: string | null;
  waits: boolean;
  version: string;
  number: number | null;
  rolled_back: boolean;
  behind: number;
  too_old: boolean;
  success: number | null;
  interventions: number | null;
  episodes: number;
  undelivered: number;
  silent: boolean;
  heard_s: number;
}

interface Fleet {
  robots: Robot[];
  published: { version: string; number: number; max_behind: number };
  rolled_back: string[];
}

const POLL_MS = 1000;
const MODES = { policy: "the policy drives", human: "a person drives", hold: "the arm holds", ended: "the episode has ended" };
let operator = false;
let published = ""; // as it is shown

async function start(): Promise<void> {
  const me = await ask<{ name: string; role: string }>("/api/me");
  element("me").textContent = me.name === me.role ? me.role : `${me.name} (${me.role})`;
  operator = ROLES.indexOf(me.role) >= ROLES.indexOf("operator");
  for (const id of ["rollback", "invite"]) element<HTMLButtonElement>(id).disabled = !operator;
  onClick("rollback", () => void act(async () => {
    const done = await ask<{ rolled_back: string; published: string }>(`/api/fleet/rollback?version=${published}`, "POST");
    return `Version ${done.rolled_back.slice(0, 8)} is rolled back; ${done.published.slice(0, 8)} is published again.`;
  }));
  onClick("invite", () => void act(async () => {
    const { address } = await ask<{ address: string }>("/api/invite/viewer", "POST");
    return `For one browser, within 10 minutes: ${address}`;
  }));
  setInterval(() => void load(), POLL_MS);
  await load();
}

async function load(): Promise<void> {
  if (document.hidden) return;
  try {
    show(await ask<Fleet>("/api/fleet"));
    showProblem("");
  } catch (error) {
    report(error);
  }
}

function show(fleet: Fleet): void {
  const waiting = fleet.robots.filter((robot) => robot.waits && !robot.silent).length;
  const said = waiting === 0 ? "No robot waits for a person" : waiting === 1 ? "1 robot waits for a person" : `${waiting} robots wait for a person`;
  setText(element("waiting"), said);
  element("waiting").dataset.mode = waiting > 0 ? "human" : "policy";
  const { version, number, max_behind } = fleet.published;
  published = version;
  setText(element("published"), `Published: version ${number} (${version.slice(0, 8)}). A robot that is more than ${max_behind} versions behind begins no episode.`);
  element("none").hidden = fleet.robots.length > 0;
  const list = element("robots");
  const cards = fleet.robots.map((robot) => document.getElementById(`robot-${robot.name}`) ?? card(robot.name));
  // moved only where the order changed, so that the keyboard's focus stays
  if (cards.some((one, i) => list.children[i] !== one)) {
    const focused = document.activeElement as HTMLElement | null;
    list.replaceChildren(...cards);
    if (focused !== null && list.contains(focused)) focused.focus();
  }
  fleet.robots.forEach((robot, i) => fill(cards[i], robot));
}

function card(name: string): HTMLElement {
  const item = document.createElement("li");
  item.id = `robot-${name}`;
  item.className = "robot-card";
  const title = Object.assign(document.createElement("h2"), { textContent: name });
  const state = Object.assign(document.createElement("p"), { className: "state" });
  const facts = document.createElement("dl");
  const open = Object.assign(document.createElement("button"), { type: "button", textContent: "Open its page", disabled: !operator });
  open.setAttribute("aria-label", `Open the page of ${name}`);
  open.addEventListener("click", () => void act(async () => {
    const { address } = await ask<{ address: string }>(`/api/fleet/${name}/open`, "POST");
    window.open(address, "_blank", "noopener");
    return `The page of ${name} opens in another tab.`;
  }));
  item.append(title, state, facts, open);
  return item;
}

function fill(item: HTMLElement, robot: Robot): void {
  item.className = `robot-card${robot.silent ? " silent" : robot.waits ? " waits" : ""}`;
  const who = robot.mode === "human" && robot.person !== null ? `${robot.person} drives` : MODES[robot.mode];
  const now = robot.silent ? `silent for ${Math.round(robot.heard_s)} s` : `${who}${robot.reason === "" ? "" : `: ${robot.reason}`}`;
  setText(item.querySelector(".state") as HTMLElement, `${robot.waits && !robot.silent ? "Waits for a person: " : ""}${now}`);
  const behind = robot.behind === 0 ? "newest" : `${robot.behind} behind${robot.too_old ? ", too old" : ""}`;
  const policy = `${robot.number === null ? "" : `${robot.number}, `}${robot.version.slice(0, 8)} (${robot.rolled_back ? "rolled back" : behind})`;
  const facts: [string, string][] = [
    ["Task", `${robot.task}, episode ${robot.episode}`],
    ["Policy", policy],
    ["Success alone", percent(robot.success)],
    ["Corrected", percent(robot.interventions)],
    ["Episodes with it", String(robot.episodes)],
    ["To deliver", String(robot.undelivered)],
  ];
  const list = item.querySelector("dl") as HTMLElement;
  if (list.childElementCount === 0) {
    list.append(...facts.map(([name]) => {
      const pair = document.createElement("div");
      pair.append(Object.assign(document.createElement("dt"), { textContent: name }), document.createElement("dd"));
      return pair;
    }));
  }
  facts.forEach(([, value], i) => setText(list.children[i].lastElementChild as HTMLElement, value));
  const policyBox = list.children[1].lastElementChild as HTMLElement;
  policyBox.className = robot.too_old || robot.rolled_back ? "failure" : "";
}

async function act(request: () => Promise<string>): Promise<void> {
  try {
    setText(element("done"), await request());
    await load();
  } catch (error) {
    setText(element("done"), error instanceof Error ? error.message : String(error));
  }
}

function report(error: unknown): void {
  showProblem(error instanceof Error ? error.message : String(error));
}

const percent = (share: number | null) => (share === null ? "unknown" : `${Math.round(100 * share)} %`);

start().catch(report);
