//! Every call of the driver fails once while weights come in from the GPU.

use super::{OnGpu, build, config_of, contents, gpu, tensors};
use crate::device::cuda::GpuMemory;
use crate::device::cuda::emulated::{Emulated, OUT_OF_MEMORY, UNKNOWN};
use crate::engine::{Engine, WeightsLoaded};
use crate::weights::{DType, GpuBucket, PushError, UpdateOptions, WeightTensor};

/// The bucket as another process would send it.
fn by_handle(on_gpu: &OnGpu) -> GpuBucket {
    Emulated::load().allow_ipc_to_self(true);
    let memory = GpuMemory::ipc(on_gpu.memory.handle(), 0, on_gpu.memory.bytes);
    GpuBucket::new(on_gpu.entries.clone(), memory).unwrap()
}

/// Pushes a bucket, with `around` before and after it, and commits.
fn update(
    engine: &mut Engine<WeightsLoaded>,
    bucket: &GpuBucket,
    options: UpdateOptions,
    mut around: impl FnMut(),
) -> Result<(), PushError> {
    let mut update = engine.begin_update(options).unwrap();
    around();
    let pushed = update.push_gpu_bucket(bucket);
    around();
    pushed?;
    update.commit().unwrap();
    Ok(())
}

#[test]
fn the_nth_call_fails_and_nothing_is_left_open() {
    let (emulated, device) = gpu();
    let config = config_of(true, 40);
    let sets = [1, 2].map(|seed| tensors(&config, DType::F16, seed));
    let buckets = sets.each_ref().map(|set| OnGpu::new(emulated, set));
    let mut engine = build(&device, &config, DType::F32)
        .load_weights_with(buckets[0].source(), super::converting())
        .unwrap();
    let loaded =
        |engine: &Engine<WeightsLoaded>| contents(engine).iter().map(|t| t.data.clone()).collect::<Vec<_>>();
    let mut wanted: [Vec<Vec<u8>>; 2] = Default::default();
    wanted[0] = loaded(&engine);
    engine.update_with(buckets[1].source(), super::converting()).unwrap();
    wanted[1] = loaded(&engine);
    let bucket = by_handle(&buckets[0]);
    let mut calls = 0;
    for in_place in [false, true] {
        let options = || match in_place {
            false => UpdateOptions::from(super::converting()),
            true => UpdateOptions::from(super::converting()).in_place(),
        };
        for nth in 1.. {
            let error = if nth % 2 == 0 { OUT_OF_MEMORY } else { UNKNOWN };
            let (mut begun, mut pending) = (false, false);
            let updated = update(&mut engine, &bucket, options(), || {
                match begun {
                    false => emulated.fail_call(nth, error),
                    true => pending = emulated.take_pending_failure(),
                }
                begun = true;
            });
            if pending {
                calls += nth;
                updated.unwrap();
                break;
            }
            // Whatever the driver did not close at once is closed at the next occasion.
            match (updated, engine.version()) {
                (Ok(()), _) => assert_eq!(loaded(&engine), wanted[0], "call {nth}"),
                (Err(_), Some(_)) => assert_eq!(loaded(&engine), wanted[1], "call {nth}"),
                (Err(error), None) => assert!(in_place, "call {nth}: {error}"),
            }
            engine.update_with(buckets[1].source(), super::converting()).unwrap();
            let open = emulated.live();
            assert!(!open.contains("2 opened IPC handles"), "call {nth}: {open}");
        }
        engine.update_with(buckets[1].source(), super::converting()).unwrap();
    }
    assert!(calls > 200, "{calls}");
    drop((buckets, engine, device));
    emulated.assert_clean();
}

#[test]
fn a_lost_gpu_is_an_error_and_leaves_nothing_open() {
    let (emulated, device) = gpu();
    let config = config_of(true, 40);
    let set: Vec<WeightTensor> = tensors(&config, DType::F32, 1);
    let on_gpu = OnGpu::new(emulated, &set);
    let mut engine = build(&device, &config, DType::F32).load_weights(on_gpu.source()).unwrap();
    let bucket = by_handle(&on_gpu);
    for nth in [1, 20, 60, 100] {
        let mut lose = Some(nth);
        let lost = update(&mut engine, &bucket, UpdateOptions::default(), || match lose.take() {
            Some(nth) => emulated.lose(nth, UNKNOWN),
            None => emulated.find_again(),
        });
        assert!(lost.is_err(), "call {nth}");
    }
    update(&mut engine, &bucket, UpdateOptions::default(), || ()).unwrap();
    assert_eq!(contents(&engine), set);
    drop((on_gpu, engine, device));
    let live = emulated.live();
    assert!(!live.contains("IPC"), "{live}");
}
