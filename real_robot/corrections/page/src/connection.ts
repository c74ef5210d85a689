// The control connection: state comes in; the lease, inputs and commands go out. It reconnects by itself.

import { NO_SESSION, SESSION_ENDED, type Command, type Devices, type State } from "./protocol";

const RECONNECT_MS = 1000;

export interface Listener {
  state(state: State): void;
  problem(text: string): void;
}

export class Connection {
  private socket: WebSocket | null = null;
  private token: number | null = null;
  private waiting: (() => void)[] = []; // commands for when the lease is granted
  private asked = false; // for the lease: once, since each grant ends the one before

  constructor(private readonly listener: Listener) {
    this.open();
  }

  get holds(): boolean {
    return this.token !== null;
  }

  /** Ask for the lease if it is not held, then send the command; without a connection it is dropped. */
  command(what: Command, more: { step?: number; text?: string } = {}): void {
    if (this.socket?.readyState !== WebSocket.OPEN) return;
    this.listener.problem(""); // of the command before
    const send = () => this.send({ type: "do", token: this.token, what, ...more });
    if (this.holds) return send();
    this.waiting.push(send);
    if (!this.asked) this.send({ type: "acquire" });
    this.asked = true;
  }

  input(devices: Devices): void {
    if (this.holds) this.send({ type: "input", token: this.token, ...devices });
  }

  release(reason: string): void {
    this.waiting = [];
    if (!this.holds) return;
    this.token = null;
    this.send({ type: "release", reason });
  }

  private send(message: object): void {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  private open(): void {
    const socket = new WebSocket(`${location.origin.replace("http", "ws")}/ws/control`);
    this.socket = socket;
    socket.onmessage = (event) => this.receive(JSON.parse(event.data as string));
    socket.onopen = () => this.listener.problem("");
    socket.onclose = (event) => {
      this.token = null;
      this.waiting = []; // what is pressed now is not meant for the robot of later
      this.asked = false;
      if (event.code === NO_SESSION) return this.listener.problem(SESSION_ENDED);
      this.listener.problem("The connection to the robot is lost. Connecting again.");
      setTimeout(() => this.open(), RECONNECT_MS);
    };
  }

  private receive(message: State | { type: "lease"; token: number } | { type: "refused"; reason: string }): void {
    if (message.type === "state") {
      if (this.holds && !message.you_hold && message.holder !== null) this.token = null;
      this.listener.state(message);
    } else if (message.type === "lease") {
      this.token = message.token;
      this.asked = false;
      if (this.waiting.length === 0) return this.release("let go");
      this.waiting.splice(0).forEach((send) => send());
    } else {
      this.waiting = [];
      this.asked = false;
      if (message.reason.includes("control")) this.token = null;
      this.listener.problem(message.reason);
    }
  }
}
