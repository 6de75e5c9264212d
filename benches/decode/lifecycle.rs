//! Sleep, restore, load and wake, beside a copy of the same bytes.

use std::time::Duration;

use dormouse::{Awake, Checkpoint, Engine, Failed, MemoryReport, Request, SleepOptions, State, TensorSet};

use super::Options;
use super::common::report::{Cell, Report};
use super::common::{Outcome, Tensor, gb_per_s, machine, median, tensors, timed};

/// Times of a phase, the bytes it moves, and what the system counts less.
#[derive(Debug)]
struct Phase {
    name: &'static str,
    times: Vec<Duration>,
    moved_bytes: u64,
    freed: Option<(MemoryReport, u64)>,
}

#[derive(Debug, Default)]
struct Phases(Vec<Phase>);

impl Phases {
    /// Runs a transition. `moved_bytes` is what it copies, 0 if nothing.
    fn run<S: State, E>(
        &mut self,
        name: &'static str,
        moved_bytes: u64,
        transition: impl FnOnce() -> Result<Engine<S>, E>,
    ) -> Result<Engine<S>, E> {
        let (engine, time) = timed(transition);
        let index = self.0.iter().position(|phase| phase.name == name).unwrap_or_else(|| {
            self.0.push(Phase { name, times: Vec::new(), moved_bytes, freed: None });
            self.0.len() - 1
        });
        self.0[index].times.push(time);
        engine
    }

    /// Notes what the last phase of this name freed, by its report and by the system's count.
    fn freed(&mut self, name: &str, report: MemoryReport, resident_before: u64) {
        let freed = resident_before.saturating_sub(machine::resident_bytes());
        if let Some(phase) = self.0.iter_mut().find(|phase| phase.name == name) {
            phase.freed = Some((report, freed));
        }
    }
}

/// Writes some KV, so that a sleep has what it has in earnest.
fn fill(engine: &Engine<Awake>) -> Outcome<u64> {
    let tokens = 512.min(engine.limits().max_model_len - 1);
    engine.generate(&[Request::new(vec![1; tokens]).max_new_tokens(1)])?;
    Ok(machine::resident_bytes())
}

/// One round through all ways to sleep and to come back.
fn round(
    options: &Options,
    mut engine: Engine<Awake>,
    tensors: &[Tensor],
    phases: &mut Phases,
) -> Outcome<Engine<Awake>> {
    let weights = engine.memory().weights_bytes;
    let received = engine.expected_weights().bytes();
    let kept = SleepOptions::default();

    for (name, restore, sleep, moved) in [
        ("sleep, weights parked", "restore, parked", kept, weights),
        ("sleep, weights resident", "restore, resident", kept.resident(), 0),
    ] {
        let before = fill(&engine)?;
        let asleep = phases.run(name, moved, || engine.sleep(sleep)).map_err(|Failed { error, .. }| error)?;
        phases.freed(name, asleep.report().freed, before);
        let loaded = phases.run(restore, moved, || asleep.restore_weights());
        let loaded = loaded.map_err(|Failed { error, .. }| error)?;
        engine = phases.run("wake", 0, || loaded.wake_up()).map_err(|Failed { error, .. }| error)?;
    }
    for from_memory in [false, true] {
        let before = fill(&engine)?;
        let name = "sleep, weights discarded";
        let asleep = phases.run(name, 0, || engine.sleep_discarding(kept));
        let asleep = asleep.map_err(|Failed { error, .. }| error)?;
        phases.freed(name, asleep.report().freed, before);
        let loaded = if from_memory {
            let source = TensorSet::new(tensors.iter().map(|tensor| (tensor.spec.name.clone(), tensor)));
            phases.run("load from memory", received, || asleep.load_weights(source))
        } else {
            let source = Checkpoint::at(&options.model);
            phases.run("load from directory (page cache)", received, || asleep.load_weights(source))
        };
        let loaded = loaded.map_err(|Failed { error, .. }| error)?;
        engine = phases.run("wake", 0, || loaded.wake_up()).map_err(|Failed { error, .. }| error)?;
    }
    Ok(engine)
}

pub(crate) fn phases(options: &Options, mut engine: Engine<Awake>, report: &mut Report) -> Outcome {
    let tensors = tensors(&options.model)?;
    let mut phases = Phases::default();
    let rounds = options.times(5, 1);
    for _ in 0..rounds {
        engine = round(options, engine, &tensors, &mut phases)?;
    }
    let bytes = engine.memory().weights_bytes;
    let (warm, fresh) = machine::copy_times(bytes as usize, options.times(5, 2));
    let copies = [("memcpy of the weights", warm), ("memcpy into new memory", fresh)];
    let copies =
        copies.map(|(name, time)| Phase { name, times: vec![time], moved_bytes: bytes, freed: None });
    let mut rows = Vec::new();
    for phase in phases.0.into_iter().chain(copies) {
        let time = median(phase.times);
        let megabytes = |bytes: u64| Cell::Number(bytes as f64 / 1e6, 1);
        let (reported, resident) =
            phase.freed.map_or((Cell::Nothing, Cell::Nothing), |(report, resident)| {
                (megabytes(report.total_bytes()), megabytes(resident))
            });
        let rate = match phase.moved_bytes {
            0 => Cell::Nothing,
            bytes => Cell::Number(gb_per_s(bytes, time), 2),
        };
        let ms = Cell::Number(time.as_secs_f64() * 1e3, 2);
        rows.push(vec![phase.name.into(), ms, rate, reported, resident]);
    }
    let title = format!("Lifecycle ({:.1} MB of weights)", bytes as f64 / 1e6);
    let columns = ["phase", "ms", "GB/s", "freed MB", "resident set less MB"];
    report.table("lifecycle", &title, &columns, &rows);
    Ok(())
}
