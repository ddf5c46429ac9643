//! The simulated world: tasks, virtual time and one random source, all on one thread.
//!
//! Invariants. Whatever runs is decided by the seed alone: the ready tasks are kept in order of their ids, so
//! the order in which they were woken does not matter, and the random source picks the next one. Time moves
//! only when nothing is ready, and then to the earliest timer; places may have clocks that run faster or slower. Every task belongs to a place (a member, or the
//! outside), which can be killed or frozen as a whole.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Who a task belongs to: 0 is the outside (clients, network, checks), others are members.
pub type Place = u64;

/// The outside.
pub const OUTSIDE: Place = 0;

/// Nanoseconds on the clock when a world begins; not 0, so that instants before the start exist.
const BEGIN: u64 = 1_000_000_000_000;
/// The main future's id among the ready tasks.
const MAIN: u64 = 0;
/// Virtual time after which a world is called stuck.
const MAX_ELAPSED: u64 = 1_200_000_000_000;
/// Polls without the clock moving before the world is called livelocked.
const MAX_STEPS_AT_ONE_TIME: u64 = 200_000;

type Ready = Arc<Mutex<BTreeSet<u64>>>;

struct TaskWaker {
    id: u64,
    ready: Ready,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(self.id);
    }
}

struct Task {
    place: Place,
    /// Absent while it is being polled.
    future: Option<BoxFuture<'static, ()>>,
    waker: Waker,
}

/// A place's own clock: it may run at another speed than the world's.
#[derive(Clone, Copy)]
struct Clock {
    /// World time at which it last changed its speed, and what it showed then.
    since: u64,
    showed: u64,
    per_mille: u64,
    /// How far its wall clock is ahead, in milliseconds.
    ahead: i64,
}

/// What every wall clock shows, in milliseconds since the Unix epoch, when a world begins.
const WALL_CLOCK_MS: u64 = 1_700_000_000_000;

impl Clock {
    fn shows(&self, now: u64) -> u64 {
        self.showed + now.saturating_sub(self.since) * self.per_mille / 1_000
    }

    /// World time at which it will show `local`.
    fn when(&self, local: u64) -> u64 {
        // Rounded up: who wakes too early would sleep again for no time at all.
        let ahead = u128::from(local.saturating_sub(self.showed)) * 1_000;
        let ahead = ahead.div_ceil(u128::from(self.per_mille));
        self.since.saturating_add(u64::try_from(ahead).unwrap_or(u64::MAX))
    }
}

struct World {
    now: u64,
    next_id: u64,
    tasks: BTreeMap<u64, Task>,
    ready: Ready,
    timers: BTreeMap<(u64, u64), Waker>,
    rng: SmallRng,
    place: Place,
    frozen: BTreeSet<Place>,
    clocks: BTreeMap<Place, Clock>,
    hash: u64,
    steps: u64,
    panics: Vec<(Place, String)>,
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

fn with<T>(f: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with(|w| f(w.borrow_mut().as_mut().expect("called inside World::run only")))
}

/// Like `with`, but does nothing where the world is gone: for drops.
fn try_with(f: impl FnOnce(&mut World)) {
    WORLD.with(|w| {
        if let Ok(mut w) = w.try_borrow_mut()
            && let Some(w) = w.as_mut()
        {
            f(w);
        }
    });
}

fn mix(hash: u64, value: u64) -> u64 {
    (hash ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// What a finished world tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// A hash over every step taken: equal for equal seeds.
    pub hash: u64,
    /// Steps taken.
    pub steps: u64,
    /// Virtual time that passed.
    pub elapsed: Duration,
    /// Panics of tasks, with their place.
    pub panics: Vec<(Place, String)>,
}

/// Runs `main` in a fresh world.
pub fn run<T>(seed: u64, main: impl Future<Output = T>) -> (T, Trace) {
    let fresh = World {
        now: BEGIN,
        next_id: MAIN + 1,
        tasks: BTreeMap::new(),
        ready: Ready::default(),
        timers: BTreeMap::new(),
        rng: SmallRng::seed_from_u64(seed),
        place: OUTSIDE,
        frozen: BTreeSet::new(),
        clocks: BTreeMap::new(),
        hash: seed,
        steps: 0,
        panics: Vec::new(),
    };
    WORLD.with(|w| {
        assert!(w.borrow().is_none(), "a world inside a world");
        *w.borrow_mut() = Some(fresh);
    });
    let out = drive(main);
    let tasks = with(|w| std::mem::take(&mut w.tasks));
    // Futures are dropped while the world still stands: they take their timers with them.
    drop(tasks);
    let world = WORLD.with(|w| w.borrow_mut().take()).expect("put there above");
    let trace = Trace {
        hash: world.hash,
        steps: world.steps,
        elapsed: Duration::from_nanos(world.now - BEGIN),
        panics: world.panics,
    };
    (out, trace)
}

/// Runs everything until `main` is done.
pub(crate) fn drive<T>(main: impl Future<Output = T>) -> T {
    let mut main = pin!(main);
    let ready = with(|w| w.ready.clone());
    let main_waker = Waker::from(Arc::new(TaskWaker {
        id: MAIN,
        ready: ready.clone(),
    }));
    main_waker.wake_by_ref();
    let mut at_one_time = 0;
    loop {
        match pick(&ready) {
            Some(MAIN) => {
                with(|w| w.place = OUTSIDE);
                if let Poll::Ready(out) = main.as_mut().poll(&mut Context::from_waker(&main_waker)) {
                    return out;
                }
            }
            Some(id) => poll_task(id),
            None => {
                advance();
                at_one_time = 0;
            }
        }
        at_one_time += 1;
        assert!(
            at_one_time < MAX_STEPS_AT_ONE_TIME,
            "the world goes on without time passing"
        );
    }
}

/// Takes one ready task, chosen at random.
fn pick(ready: &Ready) -> Option<u64> {
    with(|w| {
        let mut ready = ready.lock().unwrap_or_else(PoisonError::into_inner);
        let runs =
            |w: &World, id: u64| id == MAIN || w.tasks.get(&id).is_none_or(|task| !w.frozen.contains(&task.place));
        let id = if w.frozen.is_empty() {
            let n = ready.len();
            if n == 0 {
                return None;
            }
            let at = w.rng.random_range(0..n);
            *ready.iter().nth(at)?
        } else {
            let able: Vec<u64> = ready.iter().copied().filter(|id| runs(w, *id)).collect();
            if able.is_empty() {
                return None;
            }
            able[w.rng.random_range(0..able.len())]
        };
        ready.remove(&id);
        w.steps += 1;
        w.hash = mix(mix(w.hash, id), w.now);
        Some(id)
    })
}

fn poll_task(id: u64) {
    let taken = with(|w| {
        let task = w.tasks.get_mut(&id)?;
        let future = task.future.take()?;
        w.place = task.place;
        Some((future, task.waker.clone()))
    });
    let Some((mut future, waker)) = taken else { return };
    let polled = catch_unwind(AssertUnwindSafe(|| {
        future.as_mut().poll(&mut Context::from_waker(&waker))
    }));
    let gone = with(|w| {
        if let Err(panic) = &polled {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            w.panics.push((w.place, text.unwrap_or_default()));
        }
        match w.tasks.get_mut(&id) {
            Some(task) if matches!(polled, Ok(Poll::Pending)) => {
                task.future = Some(future);
                None
            }
            // Done, panicked, or its place was killed by what it did itself.
            _ => Some((w.tasks.remove(&id), future)),
        }
    });
    drop(gone);
}

/// Moves the clock to the earliest timer and wakes all that are due.
fn advance() {
    let due = with(|w| {
        let Some((&(at, _), _)) = w.timers.first_key_value() else {
            panic!("nothing is ready and no timer is set: the simulation is stuck");
        };
        w.now = w.now.max(at);
        assert!(w.now - BEGIN < MAX_ELAPSED, "the simulation does not end");
        let later = w.timers.split_off(&(w.now, u64::MAX));
        std::mem::replace(&mut w.timers, later)
    });
    for waker in due.into_values() {
        waker.wake();
    }
}

/// Starts a task at the place of the task that calls.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    let place = with(|w| w.place);
    spawn_at(place, future);
}

/// Starts a task at a place.
pub fn spawn_at(place: Place, future: impl Future<Output = ()> + Send + 'static) {
    with(|w| {
        let id = w.next_id;
        w.next_id += 1;
        let waker = Waker::from(Arc::new(TaskWaker {
            id,
            ready: w.ready.clone(),
        }));
        waker.wake_by_ref();
        w.tasks.insert(
            id,
            Task {
                place,
                future: Some(Box::pin(future)),
                waker,
            },
        );
    });
}

/// Runs `f` as if at a place: what it spawns belongs there.
pub fn at<T>(place: Place, f: impl FnOnce() -> T) -> T {
    let before = with(|w| std::mem::replace(&mut w.place, place));
    let out = f();
    with(|w| w.place = before);
    out
}

/// Polls `future` as if at a place, for futures that spawn while they run.
pub async fn inside<T>(place: Place, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    std::future::poll_fn(move |cx| at(place, || future.as_mut().poll(cx))).await
}

/// Drops every task of a place, as a power loss does.
pub fn kill(place: Place) {
    let dropped = with(|w| {
        let ids: Vec<u64> = w
            .tasks
            .iter()
            .filter(|(_, t)| t.place == place)
            .map(|(id, _)| *id)
            .collect();
        w.frozen.remove(&place);
        w.hash = mix(w.hash, place + 1);
        ids.into_iter().filter_map(|id| w.tasks.remove(&id)).collect::<Vec<_>>()
    });
    drop(dropped);
}

/// Stops a place from running, as SIGSTOP does.
pub fn freeze(place: Place) {
    with(|w| w.frozen.insert(place));
}

/// Lets a frozen place run again.
pub fn thaw(place: Place) {
    with(|w| w.frozen.remove(&place));
}

/// Nanoseconds on the world's clock.
pub fn now() -> u64 {
    with(|w| w.now)
}

/// Nanoseconds on the clock of the place that asks.
pub fn local_now() -> u64 {
    with(|w| w.clocks.get(&w.place).map_or(w.now, |clock| clock.shows(w.now)))
}

/// Milliseconds on the wall clock of the place that asks.
pub fn wall_clock_ms() -> u64 {
    with(|w| {
        let clock = w.clocks.get(&w.place);
        let local = clock.map_or(w.now, |clock| clock.shows(w.now));
        let right = WALL_CLOCK_MS + (local - BEGIN) / 1_000_000;
        right.saturating_add_signed(clock.map_or(0, |clock| clock.ahead))
    })
}

/// Makes the wall clock of a place jump, to be `ms` ahead of its timers.
pub fn set_ahead(place: Place, ms: i64) {
    with(|w| {
        let now = w.now;
        let clock = w.clocks.entry(place).or_insert(Clock {
            since: now,
            showed: now,
            per_mille: 1_000,
            ahead: 0,
        });
        clock.ahead = ms;
    });
}

/// Lets a place's clock run at `per_mille` thousandths of the world's speed from now on. It does not jump; timers that
/// are set already keep their time.
pub fn set_speed(place: Place, per_mille: u64) {
    with(|w| {
        let old = w.clocks.get(&place);
        let clock = Clock {
            since: w.now,
            showed: old.map_or(w.now, |clock| clock.shows(w.now)),
            per_mille: per_mille.max(1),
            ahead: old.map_or(0, |clock| clock.ahead),
        };
        w.clocks.insert(place, clock);
    });
}

/// A random number in `0..n`.
pub fn random(n: u64) -> u64 {
    with(|w| w.rng.random_range(0..n.max(1)))
}

/// True with a probability of `per_mille` in a thousand.
pub fn chance(per_mille: u64) -> bool {
    random(1000) < per_mille
}

/// A random source of its own, seeded by the world's.
pub fn fork_rng() -> SmallRng {
    with(|w| SmallRng::seed_from_u64(w.rng.random()))
}

/// Adds something observed to the trace.
pub fn note(value: u64) {
    with(|w| w.hash = mix(w.hash, value));
}

/// Waits on the virtual clock.
#[derive(Debug)]
pub struct Sleep {
    deadline: u64,
    timer: Option<(u64, u64)>,
}

/// Waits until the clock of the place that waits shows `local` nanoseconds.
pub fn sleep_until(local: u64) -> Sleep {
    let deadline = with(|w| w.clocks.get(&w.place).map_or(local, |clock| clock.when(local)));
    Sleep { deadline, timer: None }
}

/// Waits for a time.
pub fn sleep(time: Duration) -> Sleep {
    sleep_until(local_now().saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = self.deadline;
        let old = self.timer.take();
        let timer = with(|w| {
            if let Some(key) = old {
                w.timers.remove(&key);
            }
            if w.now >= deadline {
                return None;
            }
            let key = (deadline, w.next_id);
            w.next_id += 1;
            w.timers.insert(key, cx.waker().clone());
            Some(key)
        });
        self.timer = timer;
        if self.timer.is_none() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.timer.take() {
            try_with(|w| {
                w.timers.remove(&key);
            });
        }
    }
}
