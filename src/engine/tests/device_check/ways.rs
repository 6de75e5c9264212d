//! Weights that come in from the GPU itself, by addresses of this process and by the handle of another.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::models::Shape;
use super::{Check, gb_per_second};
use crate::device::cuda::GpuMemory;
use crate::device::cuda::emulated::Emulated;
use crate::device::cuda::trainer::TrainerMemory;
use crate::engine::{Engine, SleepOptions, WeightsLoaded};
use crate::weights::{BucketEntry, GpuBucket, GpuTensors, LoadOptions, UpdateOptions, WeightSource};

/// Tells the test program that it is the trainer: which GPU it is on, and whether that is an emulated one.
const TRAINER: &str = "DORMOUSE_DEVICE_CHECK_TRAINER";
/// What stands before a handle in the trainer's output.
const MARK: &str = "handle:";

/// A model one tensor behind the other, and the table.
fn flatten(shape: Shape, seed: u64) -> (Vec<BucketEntry>, Vec<u8>) {
    let (mut source, mut entries, mut data) = (shape.weights(seed), Vec::new(), Vec::new());
    for (position, tensor) in source.index().unwrap().into_iter().enumerate() {
        let begin = data.len();
        source.read(position, &mut |piece| data.extend_from_slice(piece)).unwrap();
        entries.push(BucketEntry { tensor, offset: 0, range: begin..data.len() });
    }
    (entries, data)
}

/// The trainer: exports the model until its input ends. As a test of its own it does nothing.
#[test]
fn trainer_process() {
    let Ok(order) = std::env::var(TRAINER) else { return };
    let (ordinal, emulated) = order.split_once(' ').unwrap();
    let shape = if emulated == "true" { Shape::Tiny } else { Shape::Small };
    if emulated == "true" {
        Emulated::load().device_at(ordinal.parse().unwrap()).set_granularity(4096);
    }
    let bucket = TrainerMemory::new(ordinal.parse().unwrap(), &flatten(shape, 8).1);
    let handle: Vec<String> = bucket.handle().iter().map(u8::to_string).collect();
    // Past the harness, which keeps what is printed.
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{MARK}{}", handle.join(" ")).unwrap();
    stdout.flush().unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Runs with the handle of a trainer's memory while the trainer lives.
fn with_trainer(check: &Check, use_handle: impl FnOnce([u8; 64])) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "engine::tests::device_check::ways::trainer_process", "--nocapture"])
        .env(TRAINER, format!("{} {}", check.ordinal, check.emulated))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.by_ref().map(|line| line.unwrap()).find(|line| line.contains(MARK)).unwrap();
    let numbers = line.split(MARK).nth(1).unwrap().split(' ');
    let handle: Vec<u8> = numbers.map(|number| number.trim().parse().unwrap()).collect();
    use_handle(handle.try_into().unwrap());
    drop(child.stdin.take());
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
}

/// Updates, and what they bring in a second.
fn timed(engine: &mut Engine<WeightsLoaded>, bytes: u64, update: impl Fn(&mut Engine<WeightsLoaded>)) -> f64 {
    let time = |engine: &mut Engine<WeightsLoaded>| {
        let begin = Instant::now();
        update(engine);
        begin.elapsed()
    };
    let best = (0..3).map(|_| time(engine)).min().unwrap_or(Duration::MAX);
    gb_per_second(bytes, best)
}

pub(super) fn measure(check: &mut Check, shape: Shape) {
    let loaded = check.engine(shape, 512, 1).sleep(SleepOptions::default().resident()).unwrap();
    let mut engine = loaded.restore_weights().unwrap();
    let [first, second] =
        [7, 8].map(|seed| engine.digest_of(shape.weights(seed), LoadOptions::default()).unwrap());
    let (entries, data) = flatten(shape, 7);
    let ordinal = check.ordinal.cast_signed();
    let memory = TrainerMemory::new(ordinal, &data);
    let bytes = data.len() as u64;
    drop(data);
    let slice = |entry: &BucketEntry| {
        (entry.tensor.clone(), memory.memory().slice(entry.range.start, entry.range.len()).unwrap())
    };
    let tensors = || entries.iter().map(slice).collect::<GpuTensors>();
    let digest = engine.digest_of(tensors(), LoadOptions::default()).unwrap();
    check.expect("tensors on the GPU have the digest that the host computes", digest == first);
    let by_address = timed(&mut engine, bytes, |engine| drop(engine.update(tensors()).unwrap()));
    let in_place = timed(&mut engine, bytes, |engine| {
        engine.update_with(tensors(), UpdateOptions::default().in_place()).unwrap();
    });
    check.expect("an update by addresses brings these weights", engine.version().unwrap().digest == first);
    let begin = Instant::now();
    check.expect("they verify on the GPU", engine.verify().is_ok());
    let verify = gb_per_second(bytes, begin.elapsed());
    let read = engine.tensor(&entries[0].tensor.name).unwrap();
    let mut expected = Vec::new();
    shape.weights(7).read(0, &mut |piece| expected.extend_from_slice(piece)).unwrap();
    check.expect("the embedding is what was sent", read.data == expected);

    let mut by_handle = 0.0;
    with_trainer(check, |handle| {
        let memory = GpuMemory::ipc(handle, 0, usize::try_from(bytes).unwrap());
        let bucket = GpuBucket::new(entries.clone(), memory).unwrap();
        by_handle = timed(&mut engine, bytes, |engine| {
            let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
            update.push_gpu_bucket(&bucket).unwrap();
            update.commit().unwrap();
        });
    });
    check.expect("an update by handle brings those weights", engine.version().unwrap().digest == second);
    check.expect("they verify, too", engine.verify().is_ok());
    let own = GpuMemory::ipc(memory.handle(), 0, memory.bytes);
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    let bucket = GpuBucket::new(entries.clone(), own).unwrap();
    let refused = update.push_gpu_bucket(&bucket).err().map(|error| error.to_string());
    drop(update);
    check.note(
        &format!("ways_{}", shape.name()),
        json!({"bytes": bytes, "by_address_gb_per_second": by_address, "in_place_gb_per_second": in_place,
            "by_handle_gb_per_second": by_handle, "verify_gb_per_second": verify, "own_handle": refused}),
    );
    let on_host = vec![0_u8; 4096];
    for address in [0, on_host.as_ptr() as u64] {
        let wrong = TrainerMemory::borrowed(ordinal, address, on_host.len());
        let piece = BucketEntry { tensor: entries[0].tensor.clone(), offset: 0, range: 0..on_host.len() };
        let bucket = GpuBucket::new(vec![piece], wrong.memory()).unwrap();
        let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
        let error = update.push_gpu_bucket(&bucket).unwrap_err().to_string();
        check.expect(
            "an address of the host is told from the GPU's",
            error.contains("is not an address of GPU"),
        );
    }
}
