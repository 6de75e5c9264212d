//! Random lives of an engine on a GPU whose calls fail now and then, beside a model of what it should be.

use proptest::prelude::*;

use super::*;
use crate::device::cuda::emulated::{LAUNCH_FAILED, OUT_OF_MEMORY, UNKNOWN};
use crate::engine::{Discarded, Failed, InFlight, Kept, SleepOptions, Sleeping, WeightsLoaded};
use crate::weights::{LoadOptions, UpdateOptions};

/// An engine in whatever state.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
enum Any {
    Awake(Engine<Awake>),
    Kept(Engine<Sleeping<Kept>>),
    Discarded(Engine<Sleeping<Discarded>>),
    Loaded(Engine<WeightsLoaded>),
}

/// What is known of it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Weights {
    None,
    Seed(u64),
    Torn,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Generate,
    Submit,
    Step,
    Sleep { parked: bool },
    SleepDiscarding,
    Restore,
    Load(u64),
    LoadInPieces(u64, bool),
    Update(u64),
    UpdateInPlace(u64),
    Abandon { in_place: bool },
    Park,
    Discard,
    Wake,
}

fn op() -> impl Strategy<Value = (Op, Option<(u64, i32)>)> {
    let seed = 1..3_u64;
    let op = prop_oneof![
        3 => Just(Op::Generate),
        1 => Just(Op::Submit),
        1 => Just(Op::Step),
        3 => any::<bool>().prop_map(|parked| Op::Sleep { parked }),
        2 => Just(Op::SleepDiscarding),
        3 => Just(Op::Restore),
        3 => seed.clone().prop_map(Op::Load),
        1 => (seed.clone(), any::<bool>()).prop_map(|(seed, commit)| Op::LoadInPieces(seed, commit)),
        2 => seed.clone().prop_map(Op::Update),
        1 => seed.prop_map(Op::UpdateInPlace),
        1 => any::<bool>().prop_map(|in_place| Op::Abandon { in_place }),
        1 => Just(Op::Park),
        1 => Just(Op::Discard),
        4 => Just(Op::Wake),
    ];
    let code = prop::sample::select(vec![OUT_OF_MEMORY, UNKNOWN, LAUNCH_FAILED]);
    // Early calls are those that most operations have.
    let nth = prop_oneof![3 => 1..12_u64, 2 => 1..60_u64, 1 => 1..500_u64];
    (op, prop_oneof![1 => Just(None), 2 => (nth, code).prop_map(Some)])
}

fn settle<S: crate::engine::State, T, E>(
    result: Result<T, Failed<S, E>>,
    done: impl FnOnce(T) -> Any,
    back: impl FnOnce(Engine<S>) -> Any,
) -> (Any, bool) {
    match result {
        Ok(value) => (done(value), true),
        Err(failed) => (back(failed.into_parts().0), false),
    }
}

/// Does it, if the state has it; returns what the weights are then if nothing failed.
fn apply(engine: Any, weights: &mut Weights, op: Op) -> Any {
    let options = SleepOptions::default().in_flight(InFlight::Abort);
    match (engine, op) {
        (Any::Awake(engine), Op::Generate) => {
            let Weights::Seed(seed) = *weights else { panic!("awake with {weights:?}") };
            if let Ok(outputs) = engine.generate(&probe()) {
                assert_eq!(bits(&outputs), on_fresh_gpu(seed, probe));
            }
            Any::Awake(engine)
        }
        (Any::Awake(engine), Op::Submit) => {
            engine.submit(requests().remove(0)).unwrap();
            Any::Awake(engine)
        }
        (Any::Awake(engine), Op::Step) => {
            _ = engine.step();
            Any::Awake(engine)
        }
        (Any::Awake(engine), Op::Sleep { parked }) => {
            let options = if parked { options } else { options.resident() };
            settle(engine.sleep(options), Any::Kept, Any::Awake).0
        }
        (Any::Awake(engine), Op::SleepDiscarding) => {
            let (engine, slept) = settle(engine.sleep_discarding(options), Any::Discarded, Any::Awake);
            if slept {
                *weights = Weights::None;
            }
            engine
        }
        (Any::Kept(engine), Op::Restore) => settle(engine.restore_weights(), Any::Loaded, Any::Kept).0,
        (Any::Kept(engine), Op::Discard) => {
            *weights = Weights::None;
            Any::Discarded(engine.discard_weights())
        }
        (Any::Kept(engine), Op::Load(seed)) => {
            let (engine, loaded) = settle(engine.load_weights(Seeded::new(seed)), Any::Loaded, Any::Kept);
            if loaded {
                *weights = Weights::Seed(seed);
            }
            engine
        }
        (Any::Discarded(engine), Op::Load(seed)) => {
            let loaded = engine.load_weights(Seeded::new(seed));
            let (engine, loaded) = settle(loaded, Any::Loaded, Any::Discarded);
            if loaded {
                *weights = Weights::Seed(seed);
            }
            engine
        }
        (Any::Discarded(engine), Op::LoadInPieces(seed, commit)) => {
            let mut load = match engine.begin_load(LoadOptions::default()) {
                Ok(load) => load,
                Err(failed) => return Any::Discarded(failed.into_parts().0),
            };
            if load.push_all(Seeded::new(seed)).is_err() || !commit {
                return Any::Discarded(load.abandon());
            }
            let (engine, loaded) = settle(load.commit(), Any::Loaded, Any::Discarded);
            if loaded {
                *weights = Weights::Seed(seed);
            }
            engine
        }
        (Any::Loaded(engine), op) => apply_loaded(engine, weights, op),
        // Out of order: does not compile, so it is not done.
        (engine, _) => engine,
    }
}

fn apply_loaded(mut engine: Engine<WeightsLoaded>, weights: &mut Weights, op: Op) -> Any {
    match op {
        Op::Update(seed) => {
            *weights = engine.update(Seeded::new(seed)).map_or(*weights, |_| Weights::Seed(seed))
        }
        Op::UpdateInPlace(seed) => {
            match engine.update_with(Seeded::new(seed), UpdateOptions::default().in_place()) {
                Ok(_) => *weights = Weights::Seed(seed),
                Err(_) if engine.version().is_none() => *weights = Weights::Torn,
                Err(_) => {}
            }
        }
        Op::Abandon { in_place } => {
            let options = UpdateOptions::default();
            let options = if in_place { options.in_place() } else { options };
            if let Ok(mut update) = engine.begin_update(options) {
                _ = update.push_all(Seeded::new(3));
            }
            if engine.version().is_none() {
                *weights = Weights::Torn;
            }
        }
        Op::Park => return settle(engine.park_weights(), Any::Kept, Any::Loaded).0,
        Op::Discard => {
            *weights = Weights::None;
            return Any::Discarded(engine.discard_weights());
        }
        Op::Wake => return settle(engine.wake_up(), Any::Awake, Any::Loaded).0,
        _ => {}
    }
    Any::Loaded(engine)
}

/// What is always so, without a fault.
fn check(engine: &Any, weights: Weights, emulated: EmulatedDevice, exact: bool) {
    assert!(emulated.violations().is_empty(), "{:?}", emulated.violations());
    let memory = match engine {
        Any::Awake(engine) => engine.memory(),
        Any::Kept(engine) => engine.memory(),
        Any::Discarded(engine) => engine.memory(),
        Any::Loaded(engine) => engine.memory(),
    };
    let (said, used) = (device_bytes(&memory), emulated.used());
    // More only where the driver refused to take memory back.
    assert!(used >= said && (used == said || !exact), "{used} bytes in use, {said} said");
    match engine {
        Any::Loaded(engine) if weights == Weights::Torn => assert_eq!(engine.version(), None),
        Any::Loaded(engine) => drop(engine.verify().unwrap()),
        Any::Awake(engine) => {
            let stats = engine.stats();
            assert_eq!(stats.blocks_free + stats.blocks_cached + stats.blocks_owned, stats.blocks);
        }
        _ => {}
    }
}

/// From any state to an engine that serves, without a fault.
fn recover(engine: Any, weights: Weights) -> (Engine<Awake>, u64) {
    let load = |asleep: Engine<Sleeping<Discarded>>| asleep.load_weights(Seeded::new(1)).unwrap();
    match (engine, weights) {
        (Any::Awake(engine), Weights::Seed(seed)) => {
            engine.abort_all();
            (engine, seed)
        }
        (Any::Kept(engine), Weights::Seed(seed)) => {
            (engine.restore_weights().unwrap().wake_up().unwrap(), seed)
        }
        (Any::Loaded(engine), Weights::Seed(seed)) => (engine.wake_up().unwrap(), seed),
        (Any::Loaded(mut engine), Weights::Torn) => {
            engine.update(Seeded::new(2)).unwrap();
            (engine.wake_up().unwrap(), 2)
        }
        (Any::Discarded(engine), Weights::None) => (load(engine).wake_up().unwrap(), 1),
        (engine, weights) => panic!("{engine:?} with {weights:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn c13_random_lives_with_random_faults_end_serving_what_a_fresh_engine_serves(
        ops in prop::collection::vec(op(), 1..24),
    ) {
        let gpu = Gpu::new();
        let mut engine = Any::Discarded(build_on(gpu.device()).unwrap());
        let (mut weights, mut refused) = (Weights::None, false);
        for (op, fault) in ops {
            let before = gpu.emulated.calls();
            if let Some((n, code)) = fault {
                gpu.emulated.fail_call(n, code);
            }
            engine = apply(engine, &mut weights, op);
            if let Some((n, _)) = fault && !gpu.emulated.take_pending_failure() {
                let name = gpu.emulated.call_names(before)[n as usize - 1];
                refused |= ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"].contains(&name);
            }
            check(&engine, weights, gpu.emulated, !refused);
        }
        let (engine, seed) = recover(engine, weights);
        assert_serves(&engine, seed);
        assert_serves_all(&engine, seed);
        // A whole turn takes along what was refused.
        let asleep = engine.sleep_discarding(SleepOptions::default()).unwrap();
        let engine = asleep.load_weights(Seeded::new(2)).unwrap().wake_up().unwrap();
        assert_serves(&engine, 2);
        let (said, used) = (device_bytes(&engine.memory()), gpu.emulated.used());
        assert_eq!(said, used);
        drop(engine);
        gpu.assert_clean();
    }
}
