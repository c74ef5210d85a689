// What the server sends and what may be sent to it (real_robot/corrections/messages.py, robot_thread.py).

export const ROLES = ["viewer", "labeller", "operator"]; // each may do what those before it may

/** With which the server closes a WebSocket without a session, or whose session has ended: it is not opened again. */
export const NO_SESSION = 4401;
export const SESSION_ENDED = "The session has ended. Open a new address.";

export type Mode = "policy" | "human" | "hold" | "ended";

export type Line = [number, number][]; // right and down, as shares of the image

/** The end effector's way in each camera's image. */
export interface Paths {
  planned: Line[];
  executed: Line[];
}

export interface Version {
  version: string;
  episodes: number;
  success: number | null;
  interventions: number | null;
}

export interface State {
  type: "state";
  mode: Mode;
  reason: string;
  outcome: string;
  episode: number;
  stored_as: string | null;
  task: string;
  instruction: string;
  step: number;
  max_steps: number;
  control_hz: number;
  can_rewind: boolean;
  stopped: string; // why an arm's stop is latched, or ""
  holder: string | null;
  you_hold: boolean;
  policy: string;
  actors: string;
  disagreement: number[];
  input_age_ms: number | null;
  executed: number[];
  planned: number[][];
  paths: Paths | null; // null where the simulator does not know its cameras' projection
  versions: Version[];
  cameras: string[];
}

export interface Devices {
  deadman: boolean;
  keys: string[];
  pad: number[];
  sticks: number[];
}

export type Command =
  | "take_over" | "hand_back" | "pause" | "success" | "failure" | "abort" | "next" | "rewind" | "instruct"
  | "release_stop";

export interface Row {
  id: string;
  task: string;
  instruction: string;
  steps: number;
  span: [number, number] | null; // recorded steps that are read, where it was cut
  recorded_steps: number;
  success: boolean;
  recorded_success: boolean;
  deleted: boolean;
  policy: string;
  human_share: number;
  interventions: number;
  damaged: boolean; // its file cannot be read
}

export interface Episode extends Row {
  control_hz: number;
  actors: string;
  observation_steps: number[];
  action: number[][];
  disagreement: number[];
  operators: string[];
  cameras: string[];
  history: { key: string; value: unknown; author: string; time_s: number; undoes: number | null }[];
}

export interface TrainingVersion {
  version: string;
  round: number | null;
  episodes: number;
  alone: number | null;
  corrected: number | null;
  state: "drives" | "kept" | "rolled back" | "";
}

export interface Training {
  rounds: { round: number; version: string | null; steps: number[]; loss: number[] }[];
  versions: TrainingVersion[];
}

type Rate = { value: number | null; interval: [number, number] };

/** What real_robot/corrections/success_classifier.py says of the newest fit. */
export type Classifier =
  | { state: "none" }
  | { state: "running"; fit: string; log: string }
  | { state: "failed"; fit: string; log: string }
  | {
      state: "done";
      fit: string;
      log: string;
      threshold: number;
      precision: Rate;
      recall: Rate;
      episodes: number;
      disagreements: { episode: string; task: string; labeled: boolean; declared_at: number | null; score: number }[];
    };

export async function ask<T>(path: string, method: "GET" | "POST" = "GET"): Promise<T> {
  const answer = await fetch(path, { method });
  if (!answer.ok) throw new Error(await reason(answer));
  return (await answer.json()) as T;
}

async function reason(answer: Response): Promise<string> {
  const text = await answer.text();
  try {
    return (JSON.parse(text) as { detail: string }).detail;
  } catch {
    return text || answer.statusText;
  }
}
