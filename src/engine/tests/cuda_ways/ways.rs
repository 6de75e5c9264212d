//! The same weights by every way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{OnGpu, assert_same, build, config, contents, converting, flatten, gpu, set, tensors};
use crate::control::{Controller, ControllerOptions, Operation, Payload, SleepPlan, SleepWeights, Tags};
use crate::device::cuda::emulated::OUT_OF_MEMORY;
use crate::device::cuda::trainer::TrainerMemory;
use crate::engine::{CommitError, LoadError, VerifyError};
use crate::model::ModelConfig;
use crate::weights::{
    BucketEntry, DType, GpuBucket, GpuTensors, PushError, TEST_WORKSPACE_BYTES, TensorSpec, TransferError,
    UpdateOptions,
};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

#[test]
fn every_dtype_and_conversion() {
    let (emulated, device) = gpu();
    for (tied, room) in [(false, 64 << 20), (true, 300 << 10), (true, 1)] {
        TEST_WORKSPACE_BYTES.set(room);
        let config = config(tied);
        for (from, to) in DTYPES.iter().flat_map(|from| DTYPES.map(|to| (*from, to))) {
            let sent = tensors(&config, from, 3);
            let on_gpu = OnGpu::new(emulated, &sent);
            let there = build(&device, &config, to).load_weights_with(on_gpu.source(), converting()).unwrap();
            let over = build(&device, &config, to).load_weights_with(set(&sent), converting()).unwrap();
            let digest = over.version().unwrap().digest;
            assert_eq!(there.digest_of(on_gpu.source(), converting()).unwrap(), digest);
            assert_eq!(there.report().received_bytes, over.report().received_bytes);
            assert_eq!(there.report().tensors, over.report().tensors);
            if room == 64 << 20 {
                assert_same(there, over);
            } else {
                assert_eq!((contents(&there), there.version().unwrap().digest), (contents(&over), digest));
            }
        }
    }
    drop(device);
    emulated.assert_clean();
}

/// Numbers from a seed.
fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    }
}

#[test]
fn pieces_of_tensors_in_any_order_and_split() {
    let (emulated, device) = gpu();
    let config = config(false);
    let sent = tensors(&config, DType::Bf16, 5);
    for seed in 0..6 {
        TEST_WORKSPACE_BYTES.set([64 << 20, 200 << 10, 1][seed % 3]);
        let mut random = random(seed as u64 + 1);
        let to = [DType::Bf16, DType::F32][seed % 2];
        let mut pieces = Vec::new();
        for tensor in &sent {
            let mut begin = 0;
            while begin < tensor.data.len() {
                let left = tensor.data.len() - begin;
                let most = [40, 3000, 200_000][random(3)];
                let bytes = left.min(2 + 2 * random(most));
                pieces.push((tensor, begin, bytes));
                begin += bytes;
            }
        }
        // Some order is kept, or all would wait on the host.
        for _ in 0..pieces.len() {
            let at = random(pieces.len());
            let other = (at + random(4)).min(pieces.len() - 1);
            pieces.swap(at, other);
        }
        let mut load = build(&device, &config, to).begin_load(converting()).unwrap();
        let memory = TrainerMemory::new(emulated.ordinal, &vec![0; 1 << 20]);
        while !pieces.is_empty() {
            let (mut entries, mut data) = (Vec::new(), Vec::new());
            for (tensor, offset, bytes) in pieces.drain(..pieces.len().min(1 + random(20))) {
                data.resize(data.len() + random(4), 0xee);
                let range = data.len()..data.len() + bytes;
                data.extend(&tensor.data[offset..offset + bytes]);
                entries.push(BucketEntry { tensor: tensor.spec.clone(), offset, range });
            }
            memory.write(&data);
            load.push_gpu_bucket(&GpuBucket::new(entries, memory.memory()).unwrap()).unwrap();
            // It was acknowledged: the trainer may do with its memory what it likes.
            memory.write(&vec![0xff; data.len()]);
        }
        let there = load.commit().unwrap();
        let over = build(&device, &config, to).load_weights_with(set(&sent), converting()).unwrap();
        assert_eq!(there.version().unwrap().digest, over.version().unwrap().digest);
        assert_eq!(contents(&there), contents(&over));
    }
    drop(device);
    emulated.assert_clean();
}

#[test]
fn updates_staged_in_place_and_partial() {
    let (emulated, device) = gpu();
    let config = config(true);
    let [first, second] = [1, 2].map(|seed| tensors(&config, DType::F16, seed));
    let (gpu_first, gpu_second) = (OnGpu::new(emulated, &first), OnGpu::new(emulated, &second));
    let mut engine = build(&device, &config, DType::F16).load_weights(gpu_first.source()).unwrap();
    engine.update(gpu_second.source()).unwrap();
    assert_eq!(contents(&engine), second);
    engine.update_with(gpu_first.source(), UpdateOptions::default().in_place()).unwrap();
    assert_eq!(contents(&engine), first);

    let names: Vec<String> = first.iter().step_by(3).map(|tensor| tensor.spec.name.clone()).collect();
    for options in [UpdateOptions::default(), UpdateOptions::default().in_place()] {
        let mut update = engine.begin_update(options.partial(names.clone())).unwrap();
        let entries = gpu_second.entries.iter().filter(|entry| names.contains(&entry.tensor.name));
        let bucket = GpuBucket::new(entries.cloned().collect(), gpu_second.memory.memory()).unwrap();
        update.push_gpu_bucket(&bucket).unwrap();
        update.commit().unwrap();
        let mixed = first.iter().zip(&second).enumerate();
        let mixed: Vec<_> = mixed.map(|(i, (a, b))| if i % 3 == 0 { b } else { a }.clone()).collect();
        assert_eq!(contents(&engine), mixed);
        engine.update(gpu_first.source()).unwrap();
    }

    // One tensor from the GPU, one from the host.
    let mut update = engine.begin_update(UpdateOptions::default()).unwrap();
    let (one, others) = gpu_second.entries.split_first().unwrap();
    update.push(&second[0].spec.name, &&second[0]).unwrap();
    let bucket = GpuBucket::new(others.to_vec(), gpu_second.memory.memory()).unwrap();
    update.push_gpu_bucket(&bucket).unwrap();
    let bucket = GpuBucket::new(vec![one.clone()], gpu_second.memory.memory()).unwrap();
    let twice = update.push_gpu_bucket(&bucket).unwrap_err();
    assert!(matches!(twice, PushError::Mismatch(_)), "{twice}");
    assert!(matches!(update.commit(), Err(CommitError::PushFailed)));
    assert_eq!(contents(&engine), first);
    drop((gpu_first, gpu_second, engine, device));
    emulated.assert_clean();
}

#[test]
fn a_tied_head_is_compared_on_the_gpu() {
    let (emulated, device) = gpu();
    let config = config(true);
    let mut sent = tensors(&config, DType::Bf16, 1);
    let mut head = sent[0].clone();
    head.spec.name = "lm_head.weight".into();
    sent.push(head);
    let engine =
        build(&device, &config, DType::Bf16).load_weights(OnGpu::new(emulated, &sent).source()).unwrap();
    assert_eq!(contents(&engine), sent[..sent.len() - 1]);
    *sent.last_mut().unwrap().data.last_mut().unwrap() ^= 1;
    let asleep = engine.discard_weights();
    let failed = asleep.load_weights(OnGpu::new(emulated, &sent).source()).unwrap_err();
    assert!(matches!(&failed.error, LoadError::Transfer(TransferError::TiedHeadDiffers)), "{}", failed.error);
    drop((failed, device));
    emulated.assert_clean();
}

#[test]
fn the_first_value_that_is_no_number_is_found() {
    let (emulated, device) = gpu();
    let config = config(false);
    for (room, to) in [(64 << 20, DType::F16), (1, DType::F16), (64 << 20, DType::F32)] {
        TEST_WORKSPACE_BYTES.set(room);
        for (tensor, element, value) in [
            (0, 44 * 700 + 3, f32::NAN),
            (1, 0, f32::INFINITY),
            (4, 20, f32::NEG_INFINITY),
            (13, 17, -70_000.0_f32),
        ] {
            let mut sent = tensors(&config, DType::F32, 1);
            for later in [element, sent[tensor].data.len() / 4 - 1] {
                sent[tensor].data[4 * later..][..4].copy_from_slice(&value.to_le_bytes());
            }
            let on_gpu = OnGpu::new(emulated, &sent);
            let there = build(&device, &config, to).load_weights_with(on_gpu.source(), converting());
            let over = build(&device, &config, to).load_weights_with(set(&sent), converting());
            match (there, over) {
                (Ok(there), Ok(over)) => assert_eq!(contents(&there), contents(&over)),
                (there, over) => assert_eq!(there.unwrap_err().to_string(), over.unwrap_err().to_string()),
            }
        }
    }
    drop(device);
    emulated.assert_clean();
}

#[test]
fn vocabulary_padding_is_left_on_the_gpu() {
    let (emulated, device) = gpu();
    let config = config(false);
    let mut sent = tensors(&config, DType::F32, 1);
    let expected = sent.clone();
    for tensor in &mut sent {
        if tensor.spec.shape[0] == 1203 {
            tensor.spec.shape[0] = 1280;
            tensor.data.resize(1280 * 44 * 4, 0xff);
        }
    }
    let on_gpu = OnGpu::new(emulated, &sent);
    let options = converting().trim_vocab_padding();
    let mut engine =
        build(&device, &config, DType::F32).load_weights_with(on_gpu.source(), options.clone()).unwrap();
    assert_eq!(contents(&engine), expected);
    // In two pieces, the second of padding only.
    let mut update = engine.begin_update(UpdateOptions::from(options)).unwrap();
    let cut = |entry: &BucketEntry| {
        let (range, at) = (entry.range.clone(), entry.range.len() - 44 * 4);
        [(0, range.start..range.start + at), (at, range.start + at..range.end)]
            .map(|(offset, range)| BucketEntry { tensor: entry.tensor.clone(), offset, range })
    };
    let halves = on_gpu.entries.iter().flat_map(|entry| match entry.tensor.shape[0] {
        1280 => cut(entry).to_vec(),
        _ => vec![entry.clone()],
    });
    let bucket = GpuBucket::new(halves.collect(), on_gpu.memory.memory()).unwrap();
    update.push_gpu_bucket(&bucket).unwrap();
    update.commit().unwrap();
    assert_eq!(contents(&engine), expected);
    drop((on_gpu, engine, device));
    emulated.assert_clean();
}

#[test]
fn ten_thousand_tiny_tensors_in_one_bucket() {
    let (emulated, device) = gpu();
    let config = ModelConfig::from_json(
        r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2,
        "intermediate_size": 3, "num_hidden_layers": 1112, "num_attention_heads": 1, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 5,
        "hidden_act": "silu", "eos_token_id": 0, "tie_word_embeddings": false}"#,
    )
    .unwrap();
    let sent = tensors(&config, DType::Bf16, 1);
    assert!(sent.len() > 10_000);
    let on_gpu = OnGpu::new(emulated, &sent);
    let mut load = build(&device, &config, DType::Bf16).begin_load(converting()).unwrap();
    load.push_gpu_bucket(&on_gpu.bucket()).unwrap();
    let engine = load.commit().unwrap();
    assert_eq!(contents(&engine), sent);
    drop((on_gpu, engine, device));
    emulated.assert_clean();
}

/// A trainer that doesn't wait for the acknowledgement spoils its own weights, not what the engine says of them.
#[test]
fn what_is_digested_is_what_is_stored_whatever_a_trainer_writes() {
    let (emulated, device) = gpu();
    let config = config(false);
    let on_gpu = OnGpu::new(emulated, &tensors(&config, DType::F32, 1));
    let mut engine = build(&device, &config, DType::F32).load_weights(on_gpu.source()).unwrap();
    let (stop, address, bytes) = (AtomicBool::new(false), on_gpu.memory.address, on_gpu.memory.bytes);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let memory = TrainerMemory::borrowed(emulated.ordinal, address, bytes);
            for byte in (0..=255).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                memory.write(&vec![byte; bytes]);
            }
        });
        for _ in 0..20 {
            engine.update(on_gpu.source()).unwrap();
            engine.verify().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop((on_gpu, engine, device));
    emulated.assert_clean();
}

#[test]
fn a_controller_takes_tensors_and_buckets() {
    let (emulated, device) = gpu();
    let config = config(false);
    let sets = [1, 2].map(|seed| tensors(&config, DType::F32, seed));
    let on_gpu = sets.each_ref().map(|set| OnGpu::new(emulated, set));
    let engine = build(&device, &config, DType::F32).load_weights(on_gpu[0].source()).unwrap();
    let first = engine.version().unwrap().digest;
    let second = engine.digest_of(on_gpu[1].source(), converting()).unwrap();
    let handle = Controller::with(ControllerOptions::default()).drive(engine.wake_up().unwrap());
    let sleep = SleepPlan { weights: SleepWeights::Discard, ..SleepPlan::default() };
    let run = |operation: Operation| {
        handle.control(operation).wait_timeout(Duration::from_secs(60)).expect("it hangs").outcome.unwrap()
    };
    for (weights, digest) in
        [(Payload::source(on_gpu[1].source()), second), (Payload::GpuBucket(on_gpu[0].bucket()), first)]
    {
        run(Operation::Sleep(sleep));
        run(Operation::LoadWeights { weights, options: converting() });
        run(Operation::WakeUp { tags: Tags::ALL });
        assert_eq!(handle.state().version.unwrap().digest, digest);
    }
    drop((handle, device, on_gpu));
}

#[test]
fn memory_for_the_way_is_bounded_and_given_back() {
    let (emulated, device) = gpu();
    let config = config(false);
    let sent = tensors(&config, DType::F32, 1);
    let (entries, data) = flatten(&sent);
    let on_gpu = OnGpu { entries, memory: TrainerMemory::new(emulated.ordinal, &data) };
    let mut engine = build(&device, &config, DType::F32).load_weights(on_gpu.source()).unwrap();
    let before = emulated.used();
    TEST_WORKSPACE_BYTES.set(100 << 10);
    emulated.take_peak();
    engine.update_with(on_gpu.source(), UpdateOptions::default().in_place()).unwrap();
    assert_eq!(emulated.used(), before);
    let peak = emulated.take_peak() - before;
    assert!((1..=104 << 10).contains(&peak), "{peak}");

    // Where even that is too much, the update says so and has torn nothing.
    emulated.set_memory_limit(before + 4096);
    let mut update = engine.begin_update(UpdateOptions::default().in_place()).unwrap();
    let refused = update.push_all(on_gpu.source()).unwrap_err();
    let of_memory = |error: &PushError| {
        matches!(error, PushError::Transfer(TransferError::Device(crate::DeviceError::OutOfMemory { .. })))
    };
    assert!(of_memory(&refused), "{refused}");
    drop(update);
    emulated.set_memory_limit(u64::MAX);
    assert_eq!(contents(&engine), sent);
    drop((on_gpu, engine, device));
    emulated.assert_clean();
}

#[test]
fn damage_is_found_on_the_gpu_and_over_the_host() {
    let (emulated, device) = gpu();
    let config = config(false);
    let engine =
        build(&device, &config, DType::F32).load_weights(set(&tensors(&config, DType::F32, 1))).unwrap();
    let resident = engine.state.weights.arena();
    // The last element of the last matrix: the head's.
    let layout = &engine.core.parts.layout;
    let head = layout.matrix(layout.head);
    let at = resident.address() + head.offset_bytes;
    let memory = TrainerMemory::borrowed(emulated.ordinal, at as u64, 4);
    memory.write(&[1, 2, 3, 4]);
    let is_found = |error: &VerifyError| error.to_string().ends_with("first lm_head.weight");
    assert!(is_found(&engine.verify().unwrap_err()));
    // Without memory for that it goes over the host; other faults are the device's.
    let mut found = 0;
    for nth in 1..20 {
        emulated.fail_call(nth, OUT_OF_MEMORY);
        let error = engine.verify().unwrap_err();
        if emulated.take_pending_failure() {
            break;
        }
        assert!(is_found(&error) || matches!(error, VerifyError::Device(_)), "{error}");
        found += usize::from(is_found(&error));
    }
    assert!(found > 0);
    drop((memory, engine, device));
    emulated.assert_clean();
}

#[test]
fn a_source_of_gpu_tensors_is_checked_like_any_other() {
    let (emulated, device) = gpu();
    let config = config(false);
    let sent = tensors(&config, DType::F32, 1);
    let on_gpu = OnGpu::new(emulated, &sent);
    let all = || {
        on_gpu.entries.iter().map(|entry| (entry.tensor.clone(), on_gpu.memory.claim(0, entry.range.len())))
    };
    let too_short = |(i, (spec, memory)): (usize, (TensorSpec, crate::GpuMemory))| match i {
        3 => (spec, memory.slice(0, memory.bytes() - 1).unwrap()),
        _ => (spec, memory),
    };
    let sources: [GpuTensors; 3] = [
        all().skip(1).collect(),
        all().chain(all().take(1)).collect(),
        all().enumerate().map(too_short).collect(),
    ];
    let mut engine = build(&device, &config, DType::F32);
    for (source, says) in sources.into_iter().zip(["missing", "duplicate", "bytes, its f32 shape"]) {
        let failed = engine.load_weights(source).unwrap_err();
        assert!(failed.error.to_string().contains(says), "{}", failed.error);
        engine = *failed.engine;
    }
    drop((on_gpu, engine, device));
    emulated.assert_clean();
}
