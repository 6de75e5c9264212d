//! A trainer in another process on the same GPU.

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use super::{build, config, contents, flatten, gpu, tensors};
use crate::device::cuda::emulated::Emulated;
use crate::device::cuda::trainer::TrainerMemory;
use crate::device::cuda::{GpuMemory, GpuMemoryError};
use crate::weights::{DType, GpuBucket, PushError, SourceError, TransferError, UpdateOptions};

/// Tells the test program that it is the trainer, and which GPU it is on.
const TRAINER: &str = "DORMOUSE_TEST_GPU_TRAINER";
/// What stands before a handle in the trainer's output.
const MARK: &str = "handle:";

/// The trainer: for each line that comes it fills its bucket with the next weights, and says so. As a test of its own
/// it does nothing.
#[test]
fn trainer_process() {
    let Ok(ordinal) = env::var(TRAINER) else { return };
    let emulated = Emulated::load().device_at(ordinal.parse().unwrap());
    emulated.set_granularity(4096);
    let set = |seed| flatten(&tensors(&config(true), DType::Bf16, seed)).1;
    let bucket = TrainerMemory::new(emulated.ordinal, &vec![0; set(0).len()]);
    let handle: String = bucket.handle().iter().map(|byte| format!("{byte:02x}")).collect();
    for (line, seed) in std::io::stdin().lines().zip(1..) {
        if line.unwrap() == "die" {
            std::process::abort();
        }
        bucket.write(&set(seed));
        // Past the harness, which keeps what is printed.
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{MARK}{handle}").unwrap();
        stdout.flush().unwrap();
    }
    drop(bucket);
    emulated.assert_clean();
}

struct Trainer {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Trainer {
    fn start(ordinal: i32) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "engine::tests::cuda_ways::process::trainer_process", "--nocapture"])
            .env(TRAINER, ordinal.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// Has the bucket filled, and gives its handle.
    fn fill(&mut self) -> [u8; 64] {
        writeln!(self.input).unwrap();
        let lines = self.output.by_ref().lines();
        let line = lines.map(|line| line.unwrap()).find(|line| line.contains(MARK)).unwrap();
        let text = line.split(MARK).nth(1).unwrap();
        let bytes: Vec<u8> =
            (0..64).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect();
        bytes.try_into().unwrap()
    }

    fn end(mut self) {
        drop(self.input);
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success(), "{rest}");
    }
}

#[test]
fn buckets_of_another_process_come_in_by_handle() {
    let (emulated, device) = gpu();
    let config = config(true);
    let mut trainer = Trainer::start(emulated.ordinal);
    let (entries, data) = flatten(&tensors(&config, DType::Bf16, 1));
    let bucket = |handle| GpuBucket::new(entries.clone(), GpuMemory::ipc(handle, 0, data.len())).unwrap();
    let mut load = build(&device, &config, DType::Bf16).begin_load(super::converting()).unwrap();
    load.push_gpu_bucket(&bucket(trainer.fill())).unwrap();
    assert!(!emulated.live().contains("IPC"), "closed before the trainer is told");
    // What the trainer does next is another matter.
    let handle = trainer.fill();
    let mut engine = load.commit().unwrap();
    assert_eq!(contents(&engine), tensors(&config, DType::Bf16, 1));
    let mut update = engine.begin_update(UpdateOptions::default().in_place()).unwrap();
    update.push_gpu_bucket(&bucket(handle)).unwrap();
    trainer.fill();
    update.commit().unwrap();
    assert_eq!(contents(&engine), tensors(&config, DType::Bf16, 2));
    trainer.end();
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    let gone = update.push_gpu_bucket(&bucket(handle)).unwrap_err();
    let is_handle = |error: &PushError| {
        let PushError::Transfer(TransferError::Source(SourceError::Gpu { fault, .. })) = error else {
            return false;
        };
        matches!(**fault, GpuMemoryError::Handle { .. })
    };
    assert!(is_handle(&gone), "{gone}");
    drop(update);
    assert_eq!(contents(&engine), tensors(&config, DType::Bf16, 2));
    drop((engine, device));
    emulated.assert_clean();
}

#[test]
fn a_trainer_that_dies_leaves_an_update_that_can_be_dropped() {
    let (emulated, device) = gpu();
    let config = config(true);
    let (entries, data) = flatten(&tensors(&config, DType::Bf16, 1));
    let mut trainer = Trainer::start(emulated.ordinal);
    let handle = trainer.fill();
    let half = entries.len() / 2;
    let bucket =
        |entries: &[_]| GpuBucket::new(entries.to_vec(), GpuMemory::ipc(handle, 0, data.len())).unwrap();
    let mut load = build(&device, &config, DType::Bf16).begin_load(super::converting()).unwrap();
    load.push_gpu_bucket(&bucket(&entries[..half])).unwrap();
    writeln!(trainer.input, "die").unwrap();
    assert!(!trainer.child.wait().unwrap().success());
    load.push_gpu_bucket(&bucket(&entries[half..])).unwrap_err();
    let failed = load.commit().unwrap_err();
    drop((failed, device));
    emulated.assert_clean();
}
