//! Other ways to have the same weights in a program. They digest nothing. Candle makes new tensors, in memory that
//! the allocator may have kept from the round before; torch copies over the parameters that are there.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use candle_core::Device;

use super::common::{Outcome, timed};
use super::model::Model;
use super::times::Times;

/// Makes candle tensors of the files, from memory and from the page cache.
pub(crate) fn candle(model: &Model, times: &mut Times) -> Outcome {
    let files = model.files()?;
    let mut buffers = Vec::new();
    for path in &files {
        buffers.push(std::fs::read(path)?);
    }
    let mut load = |name, load: &dyn Fn(usize) -> candle_core::Result<_>| -> Outcome {
        let (tensors, time) = timed(|| (0..files.len()).map(load).collect::<Result<Vec<_>, _>>());
        black_box(tensors?);
        times.note(name, 1, model.bytes, time);
        Ok(())
    };
    load("candle, load_buffer", &|file| candle_core::safetensors::load_buffer(&buffers[file], &Device::Cpu))?;
    load("candle, load (page cache)", &|file| candle_core::safetensors::load(&files[file], &Device::Cpu))
}

/// Has Python load the files into a module of the same tensors.
pub(crate) fn python(python: &Path, model: &Model, rounds: usize, times: &mut Times) -> Outcome {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/update/peer.py");
    let output = Command::new(python).arg(script).arg(rounds.to_string()).args(model.files()?).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    // A line per round: threads and seconds.
    for line in String::from_utf8(output.stdout)?.lines() {
        let (threads, seconds) = line.split_once(' ').ok_or("two numbers a line")?;
        let time = Duration::from_secs_f64(seconds.parse()?);
        times.note("torch, load_file + load_state_dict", threads.parse()?, model.bytes, time);
    }
    Ok(())
}
