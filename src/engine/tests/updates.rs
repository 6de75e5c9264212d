//! Every reservation, allocation, adoption and copy of every kind of update fails once: the weights, their
//! version and the committed bytes are as before, and the next update works.
#![allow(clippy::result_large_err, reason = "a failed attempt hands back its engine")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::faulty::FaultyDevice;
use super::{Seeded, awake_on, bits, build_on, fresh, loaded_on, requests};
use crate::device::DeviceError;
use crate::engine::{
    BeginError, CommitError, Engine, LoadError, SleepOptions, TensorError, Update, UpdateError, VerifyError,
    WakeError, WeightsLoaded,
};
use crate::weights::{
    DType, Delta, LoadOptions, PushError, SourceError, SparseOp, TensorSpec, UpdateOptions, WeightSource,
    WeightVersion,
};

/// The only tensors of a partial update: a part of a fused matrix, a whole one, a vector.
const PARTIAL: [&str; 3] =
    ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"];

/// Some tensors of a set.
struct Only(Seeded, Vec<usize>);

impl Only {
    fn partial(seed: u64) -> Self {
        let set = Seeded::new(seed);
        let wanted = |spec: &TensorSpec| PARTIAL.contains(&spec.name.as_str());
        let positions = (0..set.specs.len()).filter(|&i| wanted(&set.specs[i])).collect();
        Self(set, positions)
    }
}

impl WeightSource for Only {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        Ok(self.1.iter().map(|&i| self.0.specs[i].clone()).collect())
    }
    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.0.read(self.1[tensor], sink)
    }
}

/// All that an engine says about its weights, or that they are torn.
type Known = (Option<WeightVersion>, Vec<Vec<u8>>, u64);

fn known(loaded: &Engine<WeightsLoaded>) -> Known {
    let names = Seeded::new(0).specs;
    let tensor = |spec: &TensorSpec| loaded.tensor(&spec.name).unwrap().data;
    assert_eq!(loaded.verify().unwrap().tensors, names.len());
    (loaded.version(), names.iter().map(tensor).collect(), loaded.core.version_counter)
}

fn assert_torn(loaded: &Engine<WeightsLoaded>) {
    assert_eq!(loaded.version(), None);
    assert!(matches!(loaded.verify(), Err(VerifyError::Torn { .. })));
    assert!(matches!(loaded.tensor(PARTIAL[0]), Err(TensorError::Torn { .. })));
}

/// A way to update, from begin to commit.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Whole,
    Partial,
    Sparse,
    LowRank,
}

const WAYS: [Way; 4] = [Way::Whole, Way::Partial, Way::Sparse, Way::LowRank];

impl Way {
    fn options(self, in_place: bool) -> UpdateOptions {
        let options = match self {
            Way::Whole => UpdateOptions::default(),
            Way::Partial => UpdateOptions::default().partial(PARTIAL),
            Way::Sparse | Way::LowRank => UpdateOptions::default().partial([PARTIAL[0]]),
        };
        if in_place { options.in_place() } else { options }
    }

    fn feed(self, update: &mut Update<'_>) -> Result<(), PushError> {
        match self {
            Way::Whole => update.push_all(Seeded::new(2)),
            Way::Partial => update.push_all(Only::partial(2)),
            Way::Sparse => {
                let values = [1.0_f32, -2.0].map(f32::to_le_bytes).concat();
                let indices = [3, 500];
                let delta = Delta::Sparse {
                    indices: &indices,
                    values: &values,
                    dtype: DType::F32,
                    op: SparseOp::Add,
                };
                update.push_delta(PARTIAL[0], &delta)
            }
            Way::LowRank => {
                let (a, b) = ([0.5_f32; 32].map(f32::to_le_bytes), [0.25_f32; 16].map(f32::to_le_bytes));
                let (a, b) = (a.concat(), b.concat());
                let delta = Delta::LowRank { a: &a, b: &b, rank: 1, dtype: DType::F32, scale: 1.0 };
                update.push_delta(PARTIAL[0], &delta)
            }
        }
    }

    fn run(self, loaded: &mut Engine<WeightsLoaded>, in_place: bool) -> Result<(), UpdateError> {
        let mut update = loaded.begin_update(self.options(in_place))?;
        self.feed(&mut update)?;
        update.commit()?;
        Ok(())
    }
}

fn out_of_memory(error: &UpdateError) -> bool {
    match error {
        UpdateError::Begin(BeginError::NoRoom { source: error } | BeginError::Device(error))
        | UpdateError::Commit(CommitError::Device(error)) => {
            matches!(error, DeviceError::OutOfMemory { .. } | DeviceError::AddressSpace { .. })
        }
        _ => false,
    }
}

#[test]
fn c13_every_allocation_of_an_update_fails_once() {
    for way in WAYS {
        let device = FaultyDevice::new();
        let mut loaded = loaded_on(device.clone(), 1);
        let (before, committed) = (known(&loaded), device.budget().committed_bytes());
        device.refuse_nth_reservation(1);
        assert!(out_of_memory(&way.run(&mut loaded, false).unwrap_err()), "{way:?}");
        assert_eq!((known(&loaded), device.budget().committed_bytes()), (before.clone(), committed));
        let mut faults = 0;
        for n in 1..10 {
            device.budget().fail_nth(n);
            let outcome = way.run(&mut loaded, false);
            device.budget().fail_nth(0);
            assert_eq!(device.budget().committed_bytes(), committed, "{way:?}, fault {n}");
            let Err(error) = outcome else { break };
            faults += 1;
            assert!(out_of_memory(&error), "{way:?}: {error}");
            assert_eq!(known(&loaded), before, "{way:?}, fault {n}");
        }
        assert_eq!(faults, 2, "{way:?}: the new weights, and putting them in place");
        let after = known(&loaded);
        assert_ne!(after.1, before.1, "{way:?}");
        assert_eq!(after.2, before.2 + 1, "{way:?}: failed updates take no version");
        // In place needs nothing.
        device.budget().fail_nth(1);
        device.refuse_nth_reservation(1);
        way.run(&mut loaded, true).unwrap();
        device.budget().fail_nth(0);
        device.refuse_nth_reservation(0);
        assert_eq!(device.budget().committed_bytes(), committed);
        if way == Way::Whole {
            let engine = loaded.wake_up().unwrap();
            assert_eq!(bits(&engine.generate(&requests()).unwrap()), fresh(2));
        }
    }
}

/// Panics at the n-th copy of an update; tells whether one was reached.
fn panics_at(
    device: &FaultyDevice,
    n: u64,
    loaded: &mut Engine<WeightsLoaded>,
    (way, in_place): (Way, bool),
) -> bool {
    device.panic_nth(n);
    let outcome = catch_unwind(AssertUnwindSafe(|| way.run(loaded, in_place)));
    device.panic_nth(0);
    if let Ok(done) = &outcome {
        done.as_ref().unwrap();
    }
    outcome.is_err()
}

#[test]
fn c13_c18_every_copy_of_a_staged_update_panics_once_and_old_weights_stand() {
    for way in WAYS {
        let device = FaultyDevice::new();
        let mut loaded = loaded_on(device.clone(), 1);
        let (before, committed) = (known(&loaded), device.budget().committed_bytes());
        let mut panics = 0;
        while panics_at(&device, panics + 1, &mut loaded, (way, false)) {
            panics += 1;
            assert_eq!(device.budget().committed_bytes(), committed, "{way:?}, copy {panics}");
            assert_eq!(known(&loaded), before, "{way:?}, copy {panics}");
        }
        assert!(panics > 3, "{way:?}: {panics} copies in all");
        assert_eq!(known(&loaded).2, before.2 + 1, "{way:?}");
        drop(loaded.wake_up().unwrap());
        assert_eq!((Arc::strong_count(&device), device.budget().committed_bytes()), (1, 0));
    }
}

#[test]
fn c13_c18_every_copy_of_an_update_in_place_panics_once_and_is_known_to_have_torn() {
    for way in WAYS {
        let device = FaultyDevice::new();
        let mut loaded = loaded_on(device.clone(), 1);
        let (before, committed) = (known(&loaded), device.budget().committed_bytes());
        // The first copy of a change reads; all others write, the one that panics too.
        let reads = u64::from(matches!(way, Way::Sparse | Way::LowRank));
        let mut panics = 0;
        while panics_at(&device, panics + 1, &mut loaded, (way, true)) {
            panics += 1;
            assert_eq!(device.budget().committed_bytes(), committed, "{way:?}, copy {panics}");
            if panics <= reads {
                assert_eq!(known(&loaded), before, "{way:?}: nothing was written");
                continue;
            }
            assert_torn(&loaded);
            if way != Way::Whole {
                assert!(matches!(
                    way.run(&mut loaded, true),
                    Err(UpdateError::Begin(BeginError::Torn { .. }))
                ));
            }
            let (back, error) = loaded.wake_up().unwrap_err().into_parts();
            assert!(matches!(error, WakeError::Torn { .. }), "{error}");
            loaded = back;
            // Healed by a whole update, in either mode.
            let options = if panics % 2 == 0 { UpdateOptions::default() } else { Way::Whole.options(true) };
            loaded.update_with(Seeded::new(1), options).unwrap();
            assert_eq!(known(&loaded).1, before.1, "{way:?}, copy {panics}");
        }
        assert!(panics > reads, "{way:?}");
        assert_ne!(known(&loaded).1, before.1);
    }
}

#[test]
fn c13_every_allocation_and_copy_of_a_load_in_pieces_fails_once() {
    let (w1, w2) = (fresh(1), fresh(2));
    for kind in 0..3 {
        let device = FaultyDevice::new();
        let mut faults = 0;
        // Every allocation, and copies at the begin and all over.
        'fault: for n in (1..6).chain((6..1000).step_by(13)) {
            for panic in [false, true] {
                let engine = awake_on(device.clone(), 1);
                let options = SleepOptions::default();
                let attempt = |device: &FaultyDevice, n| {
                    if panic { device.panic_nth(n) } else { device.budget().fail_nth(n) }
                };
                macro_rules! load {
                    ($asleep:expr, $recover:expr) => {{
                        let asleep = $asleep;
                        let (memory, committed) = (asleep.memory(), device.budget().committed_bytes());
                        attempt(&device, n);
                        let outcome = catch_unwind(AssertUnwindSafe(|| {
                            let mut load = asleep.begin_load(LoadOptions::default()).map_err(|failed| {
                                let (asleep, error) = failed.into_parts();
                                (asleep, LoadError::from(error))
                            })?;
                            if let Err(error) = load.push_all(Seeded::new(2)) {
                                return Err((load.abandon(), LoadError::of_push(error)));
                            }
                            load.commit().map_err(|failed| {
                                let (asleep, error) = failed.into_parts();
                                (asleep, LoadError::of_commit(error))
                            })
                        }));
                        attempt(&device, 0);
                        match outcome {
                            Err(_) => {
                                assert!(panic);
                                assert_eq!(device.budget().committed_bytes(), 0, "nothing leaks");
                            }
                            Ok(Ok(loaded)) => {
                                let engine = loaded.wake_up().unwrap();
                                assert_eq!(bits(&engine.generate(&requests()).unwrap()), w2);
                                if panic { break 'fault } else { continue }
                            }
                            Ok(Err((asleep, error))) => {
                                assert!(matches!(error, LoadError::Device(_)), "{error}");
                                assert_eq!(asleep.memory(), memory);
                                assert_eq!(device.budget().committed_bytes(), committed);
                                let engine = $recover(asleep).wake_up().unwrap();
                                assert_eq!(bits(&engine.generate(&requests()).unwrap()), w1);
                            }
                        }
                        faults += 1;
                    }};
                }
                match kind {
                    0 => load!(engine.sleep(options).unwrap(), |asleep: Engine<_>| asleep
                        .restore_weights()
                        .unwrap()),
                    1 => load!(engine.sleep(options.resident()).unwrap(), |asleep: Engine<_>| asleep
                        .restore_weights()
                        .unwrap()),
                    _ => load!(engine.sleep_discarding(options).unwrap(), |asleep: Engine<_>| asleep
                        .load_weights(Seeded::new(1))
                        .unwrap()),
                }
            }
        }
        assert!(faults > 8, "{faults} faults");
        assert_eq!((Arc::strong_count(&device), device.budget().committed_bytes()), (1, 0));
    }
}

#[test]
fn c21_addresses_are_the_same_over_updates() {
    let device = FaultyDevice::new();
    let mut engine = awake_on(device, 1);
    let address = engine.state.weights.arena().address();
    for cycle in 0..10 {
        let asleep = engine.sleep(SleepOptions::default().resident()).unwrap();
        let mut loaded = asleep.restore_weights().unwrap();
        let way = WAYS[cycle % 4];
        let in_place = cycle % 3 == 0;
        if cycle % 2 == 0 {
            // One that fails half-way before it.
            let mut update = loaded.begin_update(way.options(false)).unwrap();
            way.feed(&mut update).unwrap();
        }
        way.run(&mut loaded, in_place).unwrap();
        assert_eq!(loaded.state.weights.arena().address(), address, "cycle {cycle}");
        loaded.verify().unwrap();
        engine = loaded.wake_up().unwrap();
        assert_eq!(engine.state.weights.arena().address(), address, "cycle {cycle}");
    }
    assert_eq!(engine.version().counter, 11);
}

#[test]
fn addresses_are_the_same_over_parking_and_discarding() {
    let device = FaultyDevice::new();
    let mut loaded = loaded_on(device.clone(), 1);
    let (address, committed) = (loaded.state.weights.arena().address(), device.budget().committed_bytes());
    for seed in 2..6 {
        let asleep = loaded.park_weights().unwrap();
        assert_eq!(device.budget().committed_bytes(), 0, "the device has it all back");
        let restored = asleep.restore_weights().unwrap();
        assert_eq!(restored.state.weights.arena().address(), address);
        restored.verify().unwrap();
        let asleep = match seed % 2 {
            0 => restored.park_weights().unwrap(),
            _ => restored.wake_up().unwrap().sleep(SleepOptions::default().resident()).unwrap(),
        };
        let asleep = asleep.discard_weights();
        assert_eq!(device.budget().committed_bytes(), 0);
        loaded = asleep.load_weights(Seeded::new(seed)).unwrap();
        assert_eq!(device.budget().committed_bytes(), committed);
        assert_eq!(loaded.state.weights.arena().address(), address);
    }
    let engine = loaded.wake_up().unwrap();
    assert_eq!((engine.version().counter, bits(&engine.generate(&requests()).unwrap())), (5, fresh(5)));
}

#[test]
fn a_wake_that_lacks_memory_after_an_update_keeps_the_new_weights() {
    let device = FaultyDevice::new();
    let mut loaded = loaded_on(device.clone(), 1);
    loaded.update(Seeded::new(2)).unwrap();
    for n in [1, 2] {
        device.budget().fail_nth(n);
        let (back, error) = loaded.wake_up().unwrap_err().into_parts();
        assert!(matches!(error, WakeError::Device(_)), "{error}");
        assert_eq!(back.version().unwrap().counter, 2);
        loaded = back;
    }
    // Torn ones stay torn over a wake that is refused, and are given back.
    let mut update = loaded.begin_update(Way::Whole.options(true)).unwrap();
    update.push_all(Only::partial(3)).unwrap();
    drop(update);
    let (loaded, _) = loaded.wake_up().unwrap_err().into_parts();
    assert_torn(&loaded);
    let asleep = loaded.discard_weights();
    assert_eq!(device.budget().committed_bytes(), 0);
    let engine = asleep.load_weights(Seeded::new(2)).unwrap().wake_up().unwrap();
    assert_eq!((engine.version().counter, bits(&engine.generate(&requests()).unwrap())), (3, fresh(2)));
    drop(engine);
    let _ = build_on(device).unwrap();
}
