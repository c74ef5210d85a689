// The page of the robot: what it sees and does, and the person's controls.

import { drawPlan, drawStrip } from "./charts";
import { Connection } from "./connection";
import { isTyping, readDevices, watchDevices } from "./devices";
import { element, onClick, setText, showProblem } from "./dom";
import { drawPaths, receiveFrames, showCameras } from "./frames";
import { ask, type Command, type State, type Version } from "./protocol";

const HEARTBEAT_MS = 33;
const MODES = { policy: "The policy drives", human: "You drive", hold: "The arm holds", ended: "The episode has ended" };
const COMMANDS: Command[] = ["take_over", "hand_back", "pause", "success", "failure", "abort", "next", "release_stop"];
const HOTKEYS: Record<string, string> = {
  KeyT: "take_over", KeyB: "hand_back", KeyP: "pause", Escape: "let_go",
  Digit1: "success", Digit2: "failure", Digit3: "abort", KeyN: "next",
};

let state: State | null = null;
let shownVersions = "";
let waiting = false; // to be drawn with the next frame

export function startRobot(): void {
  const connection = new Connection({ state: show, problem: showProblem });
  receiveFrames();
  for (const command of COMMANDS) onClick(command, () => connection.command(command));
  onClick("let_go", () => connection.release("let go"));
  onClick("rewind", () => connection.command("rewind", { step: Number(rewindStep().value) }));
  onClick("rollback", () => {
    const shown = state?.versions.at(-1)?.version;
    void ask(`/api/rollback?version=${shown}`, "POST").then(() => showProblem(""), report);
  });
  onClick("invite", () => void invite());
  rewindStep().addEventListener("input", showRewind);
  element("instruct").addEventListener("submit", (event) => {
    event.preventDefault();
    connection.command("instruct", { text: instruction().value });
    instruction().blur();
  });
  addEventListener("keydown", (event) => {
    const id = HOTKEYS[event.code];
    if (id === undefined || isTyping(event) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!element<HTMLButtonElement>(id).disabled && !element("robot").hidden) element(id).click();
  });
  watchDevices(
    () => connection.input(readDevices()),
    (reason) => {
      if (state?.mode === "human" || document.hidden) connection.release(reason);
    },
  );
  setInterval(() => connection.input(readDevices()), HEARTBEAT_MS);
  element("show-paths").addEventListener("change", redraw);
  addEventListener("resize", redraw);
}

function show(next: State): void {
  const before = state;
  state = next;
  showCameras(next.cameras);
  const mode = element("mode");
  mode.dataset.mode = next.mode;
  const who = next.mode === "human" && !next.you_hold ? `${next.holder ?? "A person"} drives` : MODES[next.mode];
  setText(mode, next.reason ? `${who}: ${next.reason}` : who);
  const seconds = (next.step / next.control_hz).toFixed(1);
  setText(element("clock"), `Episode ${next.episode}, ${next.task}: step ${next.step} of at most ${next.max_steps}, ${seconds} s`);
  const holder = next.you_hold ? "You control the robot" : next.holder ? `${next.holder} controls the robot` : "Nobody controls the robot";
  setText(element("holder"), holder);
  // not by the focus: a mouse takes it away while it presses a button
  if (before?.instruction !== next.instruction) instruction().value = next.instruction;
  const slider = rewindStep();
  const atEnd = before === null || Number(slider.value) === before.step;
  slider.max = String(next.step);
  if (atEnd) slider.value = String(next.step);
  element("rewind-row").hidden = !next.can_rewind;
  element("no-rewind").hidden = next.can_rewind;
  element("stopped").hidden = next.stopped === "";
  setText(element("stopped-reason"), `The arm is stopped: ${next.stopped}.`);
  showVersions(next.versions);
  if (!waiting) requestAnimationFrame(redraw); // after a frame that has arrived
  waiting = true;
}

function redraw(): void {
  waiting = false;
  if (state === null || element("robot").hidden) return;
  showRewind();
  drawPlan(state.planned, state.executed);
  element("paths-box").hidden = state.paths === null;
  drawPaths(element<HTMLInputElement>("show-paths").checked ? state.paths : null);
}

function showRewind(): void {
  const at = Number(rewindStep().value);
  setText(element("rewind-value"), String(at));
  if (state !== null) {
    drawStrip("strip", state.actors, state.disagreement, state.max_steps, at < state.step ? at : null);
  }
}

function showVersions(versions: Version[]): void {
  const text = JSON.stringify(versions);
  if (text === shownVersions) return;
  shownVersions = text;
  const percent = (share: number | null) => (share === null ? "" : `${Math.round(100 * share)} %`);
  const rows = versions.toReversed().map((one) => {
    const row = document.createElement("tr");
    const cells = [one.version.slice(0, 8), String(one.episodes), percent(one.success), percent(one.interventions)];
    row.append(...cells.map((cell) => Object.assign(document.createElement("td"), { textContent: cell })));
    return row;
  });
  element("versions").querySelector("tbody")?.replaceChildren(...rows);
  const operator = !element<HTMLButtonElement>("take_over").disabled;
  element<HTMLButtonElement>("rollback").disabled = !operator || versions.length < 2;
}

async function invite(): Promise<void> {
  try {
    const { address } = await ask<{ address: string }>("/api/invite/viewer", "POST");
    setText(element("invitation"), `For one browser, within 10 minutes: ${address}`);
  } catch (error) {
    report(error);
  }
}

function report(error: unknown): void {
  showProblem(error instanceof Error ? error.message : String(error));
}

const rewindStep = () => element<HTMLInputElement>("rewind-step");
const instruction = () => element<HTMLInputElement>("instruction");
