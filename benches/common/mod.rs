//! What the benchmarks share: the machine's own limits, tables, times.
#![allow(dead_code, reason = "each benchmark uses a part")]

pub(crate) mod machine;
pub(crate) mod report;

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) use dormouse::WeightTensor as Tensor;
use dormouse::{Checkpoint, WeightSource};

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The middle one; of an even number the lower.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// The result and how long it took.
pub(crate) fn timed<T>(f: impl FnOnce() -> T) -> (T, Duration) {
    let begin = Instant::now();
    let result = f();
    (result, begin.elapsed())
}

pub(crate) fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// All tensors of a checkpoint.
pub(crate) fn tensors(directory: &Path) -> Outcome<Vec<Tensor>> {
    let mut checkpoint = Checkpoint::at(directory);
    let mut tensors = Vec::new();
    for (index, spec) in checkpoint.index()?.into_iter().enumerate() {
        let mut data = Vec::new();
        checkpoint.read(index, &mut |piece| data.extend_from_slice(piece))?;
        tensors.push(Tensor { spec, data });
    }
    Ok(tensors)
}
