//! Addresses, lengths and handles that are wrong: errors that say what, and an engine as it was.

use std::sync::Arc;

use super::{OnGpu, build, config, contents, gpu, open, set, tensors};
use crate::device::cuda::emulated::{Emulated, EmulatedDevice};
use crate::device::cuda::trainer::TrainerMemory;
use crate::device::cuda::{GpuMemory, GpuMemoryError};
use crate::engine::tests::{Seeded, build_on, cpu};
use crate::engine::{Engine, WeightsLoaded};
use crate::weights::{
    BucketEntry, BucketError, DType, GpuBucket, GpuTensors, PushError, SourceError, TensorSpec,
    TransferError, UpdateOptions, WeightSource, WeightsDigest,
};

fn entry(spec: &TensorSpec) -> BucketEntry {
    BucketEntry { tensor: spec.clone(), offset: 0, range: 0..spec.checked_bytes().unwrap() }
}

/// Pushes the first tensor of the model from there and tells why that is refused.
fn refused(engine: &mut Engine<WeightsLoaded>, memory: GpuMemory) -> GpuMemoryError {
    let spec = engine.core.parts.manifest.tensors()[0].clone();
    let bucket = GpuBucket::new(vec![entry(&spec)], memory).unwrap();
    let mut update = engine.begin_update(UpdateOptions::default().in_place()).unwrap();
    let error = update.push_gpu_bucket(&bucket).unwrap_err();
    let PushError::Transfer(TransferError::Source(SourceError::Gpu { tensor, fault })) = error else {
        panic!("{error}")
    };
    assert_eq!(tensor, spec.name);
    *fault
}

fn loaded(emulated: EmulatedDevice) -> Engine<WeightsLoaded> {
    let config = config(false);
    build(&open(emulated), &config, DType::F32).load_weights(set(&tensors(&config, DType::F32, 1))).unwrap()
}

#[test]
fn addresses_that_are_no_memory_of_this_gpu() {
    let (emulated, device) = gpu();
    drop(device);
    let mut engine = loaded(emulated);
    let bytes = 1203 * 44 * 4;
    let here = TrainerMemory::new(emulated.ordinal, &vec![0; bytes]);
    let other = Emulated::load().device();
    other.set_granularity(4096);
    let there = TrainerMemory::new(other.ordinal, &vec![0; bytes]);
    let on_host = vec![0_u8; bytes];
    let host = TrainerMemory::borrowed(emulated.ordinal, on_host.as_ptr() as u64, bytes);
    let nowhere = TrainerMemory::borrowed(emulated.ordinal, 0, bytes);
    let end = TrainerMemory::borrowed(emulated.ordinal, u64::MAX - 5, bytes);
    assert!(matches!(refused(&mut engine, host.memory()), GpuMemoryError::NotGpuMemory { .. }));
    assert_eq!(refused(&mut engine, nowhere.memory()), GpuMemoryError::NotGpuMemory { address: 0 });
    assert!(matches!(refused(&mut engine, end.memory()), GpuMemoryError::OutOfRange { .. }));
    let expected = GpuMemoryError::OtherGpu {
        found: other.ordinal.unsigned_abs(),
        engine: emulated.ordinal.unsigned_abs(),
    };
    assert_eq!(refused(&mut engine, there.memory()), expected);
    // The driver gives memory in multiples of 512 bytes, so it can't tell that a few more are too many.
    let too_far = refused(&mut engine, here.claim(600, bytes));
    let available_bytes = bytes.next_multiple_of(512) as u64 - 600;
    let address = here.address + 600;
    assert_eq!(too_far, GpuMemoryError::OutOfRange { address, bytes, available_bytes });
    assert_eq!(contents(&engine), tensors(&config(false), DType::F32, 1));
    drop((here, there, host, nowhere, end, engine));
    emulated.assert_clean();
    other.assert_clean();
}

#[test]
fn handles_that_are_none() {
    let (emulated, device) = gpu();
    drop(device);
    let mut engine = loaded(emulated);
    Emulated::load().allow_ipc_to_self(true);
    let bytes = 1203 * 44 * 4;
    let here = TrainerMemory::new(emulated.ordinal, &vec![0; bytes]);
    let good = here.handle();
    let mut random = 1_u64;
    for attempt in 0..200 {
        let mut handle = good;
        for _ in 0..1 + attempt % 3 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            handle[random as usize % 4] ^= 1 << ((random >> 40) % 8);
        }
        if handle == good {
            continue;
        }
        let fault = refused(&mut engine, GpuMemory::ipc(handle, 0, bytes));
        assert!(matches!(fault, GpuMemoryError::Handle { .. }), "{fault}");
    }
    for handle in [[0; 64], [0xff; 64]] {
        let fault = refused(&mut engine, GpuMemory::ipc(handle, 0, bytes));
        assert!(matches!(fault, GpuMemoryError::Handle { .. }), "{fault}");
    }
    let available = bytes.next_multiple_of(512);
    for (offset, left) in [(600, available - 600), (available, 0), (usize::MAX, 0), (usize::MAX - bytes, 0)] {
        let fault = refused(&mut engine, GpuMemory::ipc(good, offset, bytes));
        let (address, available_bytes) = (offset as u64, left as u64);
        assert_eq!(fault, GpuMemoryError::OutOfRange { address, bytes, available_bytes });
    }
    drop(here);
    let gone = refused(&mut engine, GpuMemory::ipc(good, 0, bytes));
    assert!(matches!(gone, GpuMemoryError::Handle { .. }), "{gone}");
    assert_eq!(contents(&engine), tensors(&config(false), DType::F32, 1));
    drop(engine);
    emulated.assert_clean();
}

#[test]
fn the_host_reads_no_gpu_memory() {
    let (emulated, device) = gpu();
    let config = config(false);
    let sent = tensors(&config, DType::F32, 1);
    let on_gpu = OnGpu::new(emulated, &sent);
    let is_refusal = |fault: &GpuMemoryError| *fault == GpuMemoryError::NotOnGpu;
    let not_on_gpu =
        |error: &SourceError| matches!(error, SourceError::Gpu { fault, .. } if is_refusal(fault));
    let error = WeightsDigest::of(&mut on_gpu.source()).unwrap_err();
    assert!(not_on_gpu(&error), "{error}");
    assert!(matches!(on_gpu.source().read(99, &mut |_| ()), Err(SourceError::NoSuchTensor { .. })));

    let mut engine = build_on(Arc::new(cpu())).unwrap().load_weights(Seeded::new(1)).unwrap();
    let specs = engine.core.parts.manifest.tensors().to_vec();
    let memory = |spec: &TensorSpec| on_gpu.memory.claim(0, spec.checked_bytes().unwrap());
    let source: GpuTensors = specs.iter().map(|spec| (spec.clone(), memory(spec))).collect();
    let error = engine.update(source).unwrap_err();
    assert!(error.to_string().contains("only an engine on that GPU"), "{error}");
    engine.verify().unwrap();
    drop((on_gpu, engine, device));
    emulated.assert_clean();
}

#[test]
fn tables_that_are_wrong() {
    let memory = || GpuMemory::ipc([0; 64], 0, 100);
    let tensor = TensorSpec { name: "t".into(), dtype: DType::F32, shape: vec![30] };
    let at = |offset, range| BucketEntry { tensor: tensor.clone(), offset, range };
    let fault = |entries| GpuBucket::new(entries, memory()).unwrap_err();
    assert!(matches!(fault(vec![at(0, 0..104)]), BucketError::OutsideData { .. }));
    let inverted = std::ops::Range { start: 4, end: 3 };
    assert!(matches!(fault(vec![at(0, inverted)]), BucketError::Inverted { .. }));
    assert!(matches!(fault(vec![at(0, 3..3)]), BucketError::Empty { .. }));
    assert!(matches!(fault(vec![at(2, 0..4)]), BucketError::Misaligned { .. }));
    assert!(matches!(fault(vec![at(116, 0..8)]), BucketError::OutsideTensor { .. }));
    assert!(matches!(fault(vec![at(0, 0..8), at(4, 8..16)]), BucketError::Duplicate { .. }));
    assert!(matches!(fault(vec![at(0, 0..4); 70_000]), BucketError::TooManyEntries { .. }));
    // At any byte, with gaps, in any order, over each other.
    let bucket = GpuBucket::new(vec![at(8, 51..55), at(0, 3..11), at(12, 50..58)], memory()).unwrap();
    assert_eq!((bucket.entries().len(), bucket.memory().bytes()), (3, 100));
    assert_eq!(memory().slice(90, 11), None);
    assert_eq!(memory().slice(usize::MAX, 1), None);
    assert_eq!(memory().slice(40, 50).unwrap().slice(10, 40), memory().slice(50, 40));
    assert_eq!(format!("{:?}", memory().slice(40, 50).unwrap()), "GpuMemory { ipc_offset: 40, bytes: 50 }");
}
