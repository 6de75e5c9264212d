//! C15, C16, C3, C4, B06 to B08, B54, B69, B70: a controller that everything is asked of at once, from 16 threads.
//! `DORMOUSE_RACE_SECONDS` says for how long, `DORMOUSE_RACE_SEED` repeats what the threads ask for, though not
//! who comes first.
#![allow(clippy::unwrap_used, reason = "a test that fails says where")]

#[path = "control_race/automaton.rs"]
mod automaton;
#[path = "control_race/check.rs"]
mod check;
#[path = "control_race/client.rs"]
mod client;
mod common;
#[path = "common/dice.rs"]
mod dice;
#[path = "control_race/edges.rs"]
mod edges;
#[path = "common/exact.rs"]
mod exact;
#[path = "common/faulty.rs"]
mod faulty;
#[path = "control_race/kind.rs"]
mod kind;
#[path = "control_race/log.rs"]
mod log;
#[path = "control_race/operator.rs"]
mod operator;
#[path = "common/oracle.rs"]
mod oracle;
#[path = "common/watch.rs"]
mod watch;
#[path = "control_race/world.rs"]
mod world;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dormouse::control::{Controller, ControllerOptions, Payload, Reload, WhileNotServing};
use dormouse::{AnyEngine, DType, EngineBuilder, KvCapacity};

use dice::Dice;
use log::Log;
use oracle::{Mix, Oracle, SETS};
use watch::{Ends, Watch};
use world::World;

const THREADS: usize = 16;
/// How long one controller lives.
const LIFE: Duration = Duration::from_millis(1200);

fn builder(dice: &mut Dice) -> EngineBuilder {
    let blocks = dice.pick(&[12, 24, 64]);
    common::tiny_builder(false, DType::F32)
        .kv_cache(KvCapacity::Blocks(blocks))
        .max_num_seqs(dice.pick(&[2, 6]))
}

fn engine(dice: &mut Dice, oracle: &Oracle) -> AnyEngine {
    let set = oracle.weights(Mix::of(dice.below(SETS)));
    let engine = common::awake(builder(dice), &set);
    match dice.below(4) {
        0 => engine.sleep(dormouse::SleepOptions::default()).unwrap().into(),
        1 => builder(dice).build_asleep().unwrap().into(),
        _ => engine.into(),
    }
}

fn options(dice: &mut Dice, oracle: &'static Oracle) -> ControllerOptions {
    let mut options = ControllerOptions::default();
    options.max_live_requests = dice.pick(&[8, 1024, 1024]);
    options.max_control_requests = dice.pick(&[3, 64, 64]);
    options.stream_buffer = dice.pick(&[0, 1, 4, 1024]);
    options.while_not_serving = dice.pick(&[WhileNotServing::Refuse, WhileNotServing::Queue]);
    let reload = move || Payload::source(oracle.whole(kind::RELOAD.set));
    options.reload = Some(Reload::new(reload));
    options
}

/// Threads and descriptors of this process.
fn handles() -> [usize; 2] {
    ["/proc/self/task", "/proc/self/fd"].map(|path| std::fs::read_dir(path).expect("Linux").count())
}

/// Waits until this holds.
fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(10), "{what} takes too long");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A controller from its begin to its end.
fn life(seed: u64, oracle: &'static Oracle, log: &Log, length: Duration, stops: bool) {
    let mut dice = Dice::new(seed);
    let before = handles();
    let options = options(&mut dice, oracle);
    let gentle = dice.one_in(3);
    let about = format!("life {seed}, stops {stops}, gentle {gentle}, {options:?}");
    let handle = Controller::with(options).drive(engine(&mut dice, oracle));
    let first = handle.state();
    let watch = Arc::new(Watch::default());
    let world = World {
        handle: handle.clone(),
        oracle,
        watch: Arc::clone(&watch),
        over: false.into(),
        stops,
        gentle,
        open: Mutex::default(),
        asked: Mutex::default(),
        dropped: Mutex::default(),
        ended: Mutex::default(),
        tally: world::Tally::default(),
    };
    let engine = thread::scope(|scope| {
        scope.spawn(|| watch.look(&handle, seed));
        let _ends = Ends(&watch);
        race(&world, seed, length)
    });
    let (metrics, answers) = (handle.metrics(), log.take());
    assert!(handle.stop().is_err() && metrics.state.lifecycle == dormouse::control::Lifecycle::Stopped);
    println!("{about}: {} answers, {} requests", answers.len(), metrics.accepted);
    let automaton = check::history(&world, answers, &first, oracle);
    let ended = std::mem::take(&mut *world.ended.lock().unwrap());
    check::outputs(&ended, &world, &automaton);
    drop(check::given_back(engine, oracle));
    drop((world, handle));
    wait_for("the end of the threads", || handles() == before);
}

/// Lets everybody loose for a while; the engine as it comes back.
fn race(world: &World, seed: u64, length: Duration) -> AnyEngine {
    let begin = Instant::now();
    thread::scope(|scope| {
        let work = |number: u64| move || worker(world, seed.wrapping_mul(31).wrapping_add(number));
        let workers: Vec<_> = (0..THREADS as u64).map(|number| scope.spawn(work(number))).collect();
        while !workers.iter().all(|worker| worker.is_finished()) {
            thread::sleep(Duration::from_millis(10));
            if begin.elapsed() > length && world.stops {
                let _waiting = world.watch.begin("stop".into());
                let engine = world.handle.stop().expect("the first to stop it");
                return finish_stopped(world, workers, engine);
            }
            if begin.elapsed() > length {
                world.over.store(true, Ordering::Relaxed);
            }
            world.nurse(30);
        }
        workers.into_iter().for_each(|worker| worker.join().expect("no worker fails"));
        quiesce(world)
    })
}

fn finish_stopped(
    world: &World,
    workers: Vec<thread::ScopedJoinHandle<'_, ()>>,
    engine: AnyEngine,
) -> AnyEngine {
    world.over.store(true, Ordering::Relaxed);
    workers.into_iter().for_each(|worker| worker.join().expect("no worker fails"));
    engine
}

fn worker(world: &World, seed: u64) {
    let mut dice = Dice::new(seed);
    let mut partials = Vec::new();
    while !world.is_over() {
        match dice.below(3) {
            0 => world.operate(&mut dice),
            _ => world.generate(&mut dice, &mut partials),
        }
    }
}

/// Nobody asks for anything any more: all is as if nothing had been.
fn quiesce(world: &World) -> AnyEngine {
    while !world.is_serving() {
        world.nurse(0);
    }
    let handle = &world.handle;
    wait_for("the end of what was dropped", || handle.status().live_requests == 0);
    let request = oracle::request(7);
    let output = handle.submit(request.clone()).expect("it serves").wait().expect("it serves");
    world::add(&world.tally.accepted);
    assert!(!oracle::was_aborted(&output));
    world.oracle.check(&request, &output);
    let status = handle.status();
    assert_eq!((status.busy, status.step_error), (None, None));
    check::counts(world, &handle.metrics(), &world.ended.lock().unwrap());
    handle.stop().expect("the first to stop it")
}

#[test]
fn c15_c16_everything_at_once_from_sixteen_threads() {
    let seconds = dice::number("DORMOUSE_RACE_SECONDS").unwrap_or(5);
    let seed = dice::seed("DORMOUSE_RACE_SEED");
    println!("DORMOUSE_RACE_SEED={seed}");
    let log = Log::install();
    let oracle: &'static Oracle = Box::leak(Box::new(Oracle::new()));
    let begin = Instant::now();
    for number in 0.. {
        let left = Duration::from_secs(seconds).saturating_sub(begin.elapsed());
        if left.is_zero() {
            break;
        }
        life(seed.wrapping_add(number), oracle, &log, left.min(LIFE), number % 3 == 2);
    }
}
