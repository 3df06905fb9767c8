// Numbers, times and sizes as people read them.

export const NOTHING = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

/** 183k, 1.2M */
export function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NOTHING;
  const [size, unit] = [[1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => Math.abs(value) >= least) || [1, ""];
  return `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(3))}${unit}`;
}

export function whole(value) {
  return value === null || value === undefined ? NOTHING : Math.round(value).toLocaleString("en");
}

export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${Math.round(100 * share)} %`;
}

/** 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NOTHING;
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let rest = Math.round(seconds);
  const first = units.findIndex(([, size]) => rest >= size);
  const parts = [];
  for (const [name, size] of units.slice(first, first + 2)) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) parts.push(`${count} ${name}`);
  }
  return parts.join(" ");
}

export function ago(time) {
  if (!time) return NOTHING;
  const seconds = Date.now() / 1000 - time;
  if (seconds < 5) return "now";
  const [name, size] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, each]) => seconds >= each);
  return `${Math.floor(seconds / size)} ${name} ago`;
}

export function date(time) {
  if (!time) return NOTHING;
  return new Date(1000 * time).toLocaleString("sv", { dateStyle: "short", timeStyle: "short" });
}

export function clock(time) {
  return time ? new Date(1000 * time).toLocaleTimeString("sv") : "";
}

export function bytes(size) {
  if (size === null || size === undefined || !Number.isFinite(size)) return NOTHING;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let power = 0;
  while (size >= 1024 && power < units.length - 1) {
    size /= 1024;
    power += 1;
  }
  return `${size >= 100 || power === 0 ? Math.round(size) : size.toFixed(1)} ${units[power]}`;
}

export function count(amount, noun) {
  return `${amount.toLocaleString("en")} ${noun}${amount === 1 ? "" : "s"}`;
}

/** A value of a configuration as text. */
export function value(any) {
  if (any === null || any === undefined) return NOTHING;
  if (typeof any === "number") return Number.isInteger(any) ? String(any) : String(Number(any.toPrecision(6)));
  return typeof any === "string" ? any : JSON.stringify(any);
}

/** Text without escape sequences and other control characters, which only a terminal understands. */
export function plain(text) {
  return String(text)
    .replace(/\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)?|\x1b[@-_]/g, "")
    .replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f]/g, "");
}

/** The name that addresses a run in the API: its id, or SWEEP-3 for a trial. */
export function keyOf(run) {
  return run.sweep && (run.trial ?? null) !== null ? `${run.sweep}-${run.trial}` : run.run_id;
}

/** What people call a run. All trials have the name of their sweep. */
export function titleOf(run) {
  return plain((run.trial ?? null) === null ? run.name || run.run_id : keyOf(run));
}
