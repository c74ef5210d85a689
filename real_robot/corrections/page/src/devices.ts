// What the person holds: keys, the pads on the page, a gamepad. Read, never scaled or interpreted here.

import { element } from "./dom";
import type { Devices } from "./protocol";

const RADIUS = 0.4; // of a pad, at which its reading is 1
const SHOULDERS = [4, 5, 6, 7]; // buttons of the standard mapping
const BUTTON_A = 0;
const GRIPPER = "KeyG";

const keys = new Set<string>();
const pad = { pressed: false, right: 0, down: 0, lifted: 0 };
let gripperPressed = false;

/** Call `changed` when something is pressed or let go, `lost` when a device or the window is lost.
 *
 * A pointer that moves is read with the next regular message: fast screens report moves faster than the server reads. */
export function watchDevices(changed: () => void, lost: (reason: string) => void): void {
  addEventListener("keydown", (event) => {
    if (!isTyping(event) && !event.ctrlKey && !event.metaKey && !event.altKey) update(() => keys.add(event.code));
  });
  addEventListener("keyup", (event) => update(() => keys.delete(event.code)));
  addEventListener("blur", () => letGo("the window lost focus"));
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) letGo("the tab is hidden");
  });
  addEventListener("pagehide", () => letGo("the page was left"));
  addEventListener("gamepaddisconnected", () => letGo("the gamepad is unplugged"));
  watchPad("pad", "knob", (right, down) => Object.assign(pad, { right, down }));
  watchPad("lift", "lift-knob", (_, down) => Object.assign(pad, { lifted: -down }));
  const gripper = element("gripper");
  gripper.addEventListener("click", () => {
    update(() => (gripperPressed = true));
    update(() => (gripperPressed = false));
  });

  function update(change: () => void): void {
    change();
    changed();
  }

  function letGo(reason: string): void {
    keys.clear();
    Object.assign(pad, { pressed: false, right: 0, down: 0, lifted: 0 });
    changed();
    lost(reason);
  }

  function watchPad(id: string, knobId: string, read: (right: number, down: number) => void): void {
    const area = element(id);
    const knob = element(knobId);
    const move = (event: PointerEvent, pressed: boolean) => {
      const box = area.getBoundingClientRect();
      const right = pressed ? clamp((event.clientX - box.left) / box.width - 0.5) : 0;
      const down = pressed ? clamp((event.clientY - box.top) / box.height - 0.5) : 0;
      knob.style.transform = `translate(${id === "lift" ? 0 : right * box.width}px, ${down * box.height}px)`;
      pad.pressed = pressed;
      read(right / RADIUS, down / RADIUS);
    };
    area.addEventListener("pointerdown", (event) => {
      area.setPointerCapture(event.pointerId);
      update(() => move(event, true));
    });
    area.addEventListener("pointermove", (event) => {
      if (area.hasPointerCapture(event.pointerId)) move(event, true);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"] as const) {
      area.addEventListener(end, (event) => update(() => move(event, false)));
    }
  }
}

export function readDevices(): Devices {
  const gamepad = navigator.getGamepads?.().find((one) => one !== null && one.mapping === "standard") ?? null;
  const pressed = (button: number) => gamepad?.buttons[button]?.pressed ?? false;
  const held = [...keys].filter((key) => !key.startsWith("Shift")).slice(0, 15);
  if (gripperPressed || pressed(BUTTON_A)) held.push(GRIPPER);
  return {
    deadman: keys.has("ShiftLeft") || keys.has("ShiftRight") || pad.pressed || SHOULDERS.some(pressed),
    keys: held,
    pad: pad.pressed ? [pad.right, pad.down, pad.lifted] : [],
    sticks: gamepad === null ? [] : [...gamepad.axes].slice(0, 4),
  };
}

/** Whether a key press belongs to a text field or a list. */
export function isTyping(event: KeyboardEvent): boolean {
  const target = event.target;
  if (target instanceof HTMLSelectElement || target instanceof HTMLTextAreaElement) return true;
  return target instanceof HTMLInputElement && target.type !== "range" && target.type !== "checkbox";
}

function clamp(value: number): number {
  return Math.max(-RADIUS, Math.min(RADIUS, value));
}
