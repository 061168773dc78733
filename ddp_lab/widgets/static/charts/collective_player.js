// Where a reader is in the steps of a collective: at rest after one, or on the way to another.

const STEP_MS = 1400; // at normal speed

export class Player {
  // show(): the position has changed; alive(): false stops it
  constructor(show, alive) {
    this.show = show;
    this.alive = alive;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.speed = 1;
    this.load(0);
  }

  load(count) {
    this.count = count;
    this.at = 0; // steps done; a fraction: within the next one
    this.until = null; // where it goes
  }

  get moving() {
    return this.until !== null;
  }

  // The last step that has begun, from 1; 0 before the first.
  get step() {
    return Math.ceil(this.at);
  }

  toggle() {
    if (this.moving) this.pause();
    else if (this.count) {
      if (this.at >= this.count) this.at = 0;
      this.run(this.count);
    }
  }

  pause() {
    this.until = null;
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.show();
  }

  forward() {
    if (this.at < this.count) this.run(Math.floor(this.at) + 1);
  }

  back() {
    this.go(Math.ceil(this.at) - 1);
  }

  go(step) {
    this.at = Math.min(Math.max(step, 0), this.count);
    this.pause();
  }

  run(until) {
    this.pause();
    this.until = until;
    // Without motion a step is a jump; of several each stays for a while.
    if (this.calm.matches) this.jump();
    else {
      this.last = null;
      this.frame = requestAnimationFrame((now) => this.tick(now));
    }
    this.show();
  }

  jump() {
    if (!this.moving || !this.alive()) return this.pause();
    this.at = Math.min(Math.floor(this.at) + 1, this.count);
    if (this.at >= this.until) return this.pause();
    this.show();
    this.timer = setTimeout(() => this.jump(), STEP_MS / this.speed);
  }

  tick(now) {
    if (!this.moving || !this.alive()) return this.pause();
    // A page that was in the background does not leap.
    this.at += (Math.min(now - (this.last ?? now), 100) / STEP_MS) * this.speed;
    this.last = now;
    if (this.at >= this.until) {
      this.at = this.until;
      return this.pause();
    }
    this.show();
    this.frame = requestAnimationFrame((later) => this.tick(later));
  }
}
