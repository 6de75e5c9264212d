//! Arenas and transfers: memory leaves and comes back, contents move, limits and faults leave nothing behind.

use super::rig::*;
use super::{cpu, emulated_gpu, new_emulated, open};
use crate::device::cuda::emulated::{EmulatedDevice, ILLEGAL_ADDRESS, OUT_OF_MEMORY, UNKNOWN};
use crate::device::cuda::{CudaDevice, CudaOptions};
use crate::device::{Arena, Device, DeviceError};

const MIB: usize = 1 << 20;
/// Several pieces of physical memory.
const SOME: usize = 200_001;

fn fill(device: &dyn Device, arena: &mut Arena, byte: u8) {
    let len = arena.committed();
    device.write_bytes(arena.view_mut(0, len), &vec![byte; len]).unwrap();
}

fn all(device: &dyn Device, arena: &Arena, byte: u8) -> bool {
    let mut bytes = vec![!byte; arena.committed()];
    device.read_bytes(arena.view(0, bytes.len()), &mut bytes).unwrap();
    bytes.iter().all(|&b| b == byte)
}

fn committed(device: &dyn Device, label: &'static str, bytes: usize) -> Arena {
    let mut arena = device.reserve(label, bytes).unwrap();
    arena.commit(bytes).unwrap();
    arena
}

#[test]
fn c19_decommitted_memory_is_the_gpus_again_and_comes_back_zeroed_at_its_address() {
    let (emulated, device) = emulated_gpu();
    let mut arena = device.reserve("test", 16 * MIB).unwrap();
    let address = arena.address();
    let free = device.memory().unwrap().free_bytes;
    for bytes in [5 * MIB, 1, 4096, 4097, 16 * MIB] {
        let whole = bytes.next_multiple_of(4096) as u64;
        arena.commit(bytes).unwrap();
        assert_eq!((emulated.used(), device.memory().unwrap().free_bytes), (whole, free - whole));
        assert!(all(&device, &arena, 0));
        fill(&device, &mut arena, 7);
        assert!(all(&device, &arena, 7));
        assert_eq!(arena.decommit(), bytes);
        assert_eq!((emulated.used(), arena.address()), (0, address));
        assert_eq!(device.memory().unwrap().free_bytes, free);
    }
    drop((arena, device));
    emulated.assert_clean();
}

#[test]
fn c21_adoption_moves_contents_to_the_old_address() {
    let (emulated, device) = emulated_gpu();
    for bytes in [0, 1, 5000, SOME, 3 * MIB] {
        let mut arena = device.reserve("weights", bytes + 3 * MIB).unwrap();
        arena.commit(bytes).unwrap();
        fill(&device, &mut arena, 1);
        let address = arena.address();
        let whole = bytes.next_multiple_of(4096) as u64;
        emulated.take_peak();
        for byte in 2..5 {
            let mut staged = committed(&device, "staged", bytes);
            fill(&device, &mut staged, byte);
            arena.adopt(staged).unwrap();
            assert!(all(&device, &arena, byte));
            assert_eq!((arena.address(), emulated.used()), (address, whole));
        }
        assert_eq!(emulated.take_peak(), 2 * whole, "one beside the other, no more");
        arena.decommit();
        // Into nothing.
        let mut staged = committed(&device, "staged", bytes);
        fill(&device, &mut staged, 9);
        arena.adopt(staged).unwrap();
        assert!(all(&device, &arena, 9));
        // It is an arena like any other: it can leave and come back.
        arena.decommit();
        arena.commit(bytes + 2 * MIB).unwrap();
        assert!(all(&device, &arena, 0));
        drop(arena);
        assert_eq!(emulated.used(), 0);
    }
    drop(device);
    emulated.assert_clean();
}

#[test]
fn the_limit_covers_all_arenas_and_no_other_devices() {
    let emulated = new_emulated();
    let (device, other) = (open(emulated, Some(64 << 10)), open(emulated, None));
    let mut first = device.reserve("first", 1 << 20).unwrap();
    let mut second = device.reserve("second", 1 << 20).unwrap();
    let elsewhere = committed(&other, "elsewhere", 1 << 20);
    first.commit(40 << 10).unwrap();
    let refused = second.commit(28 << 10).unwrap_err();
    let DeviceError::OutOfMemory { label, needed_bytes, available_bytes } = refused else {
        panic!("{refused}");
    };
    assert_eq!((label, needed_bytes, available_bytes), ("second", 28 << 10, 24 << 10));
    assert_eq!(second.committed(), 0);
    second.commit(24 << 10).unwrap();
    second.decommit();
    first.decommit();
    second.commit(64 << 10).unwrap();
    drop((first, second, elsewhere, device, other));
    emulated.assert_clean();
}

#[test]
fn more_than_the_gpu_has_is_refused_and_what_was_taken_goes_back() {
    let (emulated, device) = emulated_gpu();
    emulated.set_memory_limit(20 << 20);
    let other = committed(&device, "other", 5 * MIB);
    let mut arena = device.reserve("large", 64 * MIB).unwrap();
    for _ in 0..3 {
        let refused = arena.commit(16 * MIB).unwrap_err();
        let DeviceError::OutOfMemory { label: "large", needed_bytes, available_bytes } = refused else {
            panic!("{refused}")
        };
        assert_eq!(needed_bytes, 16 << 20);
        assert!(available_bytes <= 15 << 20, "{available_bytes} bytes are free at most");
        assert_eq!((arena.committed(), emulated.used()), (0, 5 << 20));
    }
    arena.commit(15 * MIB).unwrap();
    let refused = device.reserve("absurd", usize::MAX).unwrap_err();
    assert!(matches!(refused, DeviceError::AddressSpace { .. }), "{refused}");
    let refused = device.reserve("absurd", 1 << 60).unwrap_err();
    assert!(matches!(refused, DeviceError::AddressSpace { .. }), "{refused}");
    drop((other, arena, device));
    emulated.assert_clean();
}

#[test]
fn bytes_of_any_number_and_alignment_go_in_and_out() {
    let (emulated, device) = emulated_gpu();
    let mut noise = Noise::new(1);
    let mut arena = committed(&device, "test", 40 * MIB);
    for len in [0, 1, 3, 4096, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 16 * MIB, 33 * MIB + 7] {
        for (offset, misalign) in [(0, 0), (5, 3)] {
            let mut source = vec![0; misalign];
            source.extend(noise.bytes(len));
            device.write_bytes(arena.view_mut(offset, len), &source[misalign..]).unwrap();
            // The source may change as soon as the call returns.
            let expected = source.split_off(misalign);
            source.fill(0xee);
            let mut out = vec![0; misalign + len];
            device.read_bytes(arena.view(offset, len), &mut out[misalign..]).unwrap();
            assert!(out[misalign..] == expected, "{len} bytes at {offset}");
        }
    }
    let (from, to) = arena.view_mut::<u8>(0, 2 * MIB).split_at(MIB);
    device.copy_bytes(to, from.as_view()).unwrap();
    let mut out = [vec![0; MIB], vec![1; MIB]];
    for (half, out) in out.iter_mut().enumerate() {
        device.read_bytes(arena.view(half * MIB, MIB), out).unwrap();
    }
    assert!(out[0] == out[1]);
    drop((arena, device));
    emulated.assert_clean();
}

#[test]
fn results_of_any_size_are_shown() {
    let (emulated, device) = emulated_gpu();
    let x = Noise::new(2).vec(300_000);
    let arena = f32_arena(&device, &x);
    for len in [1, 0, 7, 100_000, 64, 300_000] {
        let mut seen = Vec::new();
        device.with_host(arena.view(0, len), &mut |x| seen.extend_from_slice(x)).unwrap();
        assert_eq!(bits(&seen), bits(&x[..len]));
    }
    drop((arena, device));
    emulated.assert_clean();
}

#[test]
fn b61_parking_memory_is_pinned_and_kept_or_goes_back() {
    for keep in [true, false] {
        let emulated = new_emulated();
        let ordinal = emulated.ordinal.unsigned_abs();
        let options = CudaOptions { ordinal, memory_limit_bytes: None, keep_parking_memory: keep };
        let device = CudaDevice::open(options, cpu()).unwrap();
        let contents = Noise::new(3).bytes(SOME);
        let mut arena = device.reserve("weights", SOME).unwrap();
        for _ in 0..3 {
            device.commit_with(&mut arena, &contents).unwrap();
            let staging = device.staging_bytes();
            let mut parked = device.host_buffer("parked weights", SOME).unwrap();
            device.read_bytes(arena.view(0, SOME), parked.as_mut_slice()).unwrap();
            assert!(parked.as_slice() == contents);
            arena.decommit();
            assert_eq!(emulated.used(), 0);
            let registered = emulated.live();
            assert!(registered.contains("4 host registrations"), "{registered}");
            let before = emulated.calls();
            device.commit_with(&mut arena, parked.as_slice()).unwrap();
            let copies = emulated.call_names(before);
            assert_eq!(copies.iter().filter(|&&name| name == "cuMemcpyHtoDAsync").count(), 4, "one a piece");
            drop(parked);
            assert_eq!(emulated.live().contains("host registrations"), keep);
            if keep {
                assert!(device.staging_bytes().0 >= SOME as u64);
            } else {
                assert_eq!(device.staging_bytes(), staging);
            }
            let mut out = vec![0; SOME];
            device.read_bytes(arena.view(0, SOME), &mut out).unwrap();
            assert!(out == contents);
            arena.decommit();
        }
        // A larger one takes the place of the one that is kept.
        drop(device.host_buffer("parked weights", 3 * SOME).unwrap());
        drop((arena, device));
        emulated.assert_clean();
    }
}

/// Weights that the system doesn't allow to pin are parked all the same.
#[test]
fn without_pinned_memory_parking_is_slower_and_not_wrong() {
    for n in 1..=4 {
        let (emulated, device) = emulated_gpu();
        let contents = Noise::new(4).bytes(SOME);
        let mut arena = device.reserve("weights", SOME).unwrap();
        emulated.fail_named("cuMemHostRegister", n, OUT_OF_MEMORY);
        let mut parked = device.host_buffer("parked weights", SOME).unwrap();
        assert!(!emulated.take_pending_failure());
        assert!(!emulated.live().contains("host registrations"), "all or none");
        parked.as_mut_slice().copy_from_slice(&contents);
        device.commit_with(&mut arena, parked.as_slice()).unwrap();
        let mut out = vec![0; SOME];
        device.read_bytes(arena.view(0, SOME), &mut out).unwrap();
        assert!(out == contents);
        drop((parked, arena, device));
        emulated.assert_clean();
    }
}

/// Has each driver call of `attempt` fail once, until none is left to fail. `attempt` says whether it succeeded; the
/// world is made anew for each.
fn every_call_fails_once<W>(
    make: impl Fn(&CudaDevice) -> W,
    attempt: impl Fn(&CudaDevice, &mut W) -> Result<(), DeviceError>,
    check: impl Fn(EmulatedDevice, &CudaDevice, &mut W, bool),
) -> u64 {
    for error in [OUT_OF_MEMORY, UNKNOWN] {
        for n in 1..10_000 {
            let (emulated, device) = emulated_gpu();
            let mut world = make(&device);
            let before = emulated.calls();
            emulated.fail_call(n, error);
            let outcome = attempt(&device, &mut world);
            let over = emulated.take_pending_failure();
            let name = emulated.call_names(before).get(n as usize - 1).copied().unwrap_or("none");
            check(emulated, &device, &mut world, outcome.is_ok());
            if let Err(refused) = outcome {
                let out_of_memory = matches!(refused, DeviceError::OutOfMemory { .. });
                assert!(!out_of_memory || error == OUT_OF_MEMORY, "{name}: {refused}");
                attempt(&device, &mut world).unwrap();
                check(emulated, &device, &mut world, true);
            }
            drop((world, device));
            let violations = emulated.violations();
            assert!(violations.is_empty(), "call {n}, {name}: {violations:?}");
            assert_eq!(emulated.live(), "", "call {n}, {name}");
            if over {
                assert!(n > 3, "{n} calls in all");
                if error == UNKNOWN {
                    return n - 1;
                }
                break;
            }
        }
    }
    panic!("it never ended");
}

#[test]
fn c13_every_call_of_a_commit_fails_once_and_nothing_is_committed() {
    every_call_fails_once(
        |device| device.reserve("test", SOME).unwrap(),
        |_, arena| match arena.committed() {
            0 => arena.commit(SOME),
            _ => Ok(()),
        },
        |emulated, device, arena, succeeded| {
            let whole = SOME.next_multiple_of(4096) as u64;
            assert_eq!((arena.committed() > 0, emulated.used()), (succeeded, whole * u64::from(succeeded)));
            assert!(all(device, arena, 0));
        },
    );
}

#[test]
fn c13_every_call_of_a_restore_fails_once_and_the_copy_stays() {
    every_call_fails_once(
        |device| {
            let mut parked = device.host_buffer("parked weights", SOME).unwrap();
            parked.as_mut_slice().fill(6);
            (device.reserve("test", SOME).unwrap(), parked)
        },
        |device, (arena, parked)| match arena.committed() {
            0 => device.commit_with(arena, parked.as_slice()),
            _ => Ok(()),
        },
        |emulated, device, (arena, parked), succeeded| {
            assert_eq!((arena.committed() > 0, emulated.used() > 0), (succeeded, succeeded));
            assert!(all(device, arena, 6) && parked.as_slice().iter().all(|&byte| byte == 6));
        },
    );
}

#[test]
fn c13_every_call_of_an_adoption_fails_once_and_the_old_contents_stand() {
    for old in [0, SOME] {
        every_call_fails_once(
            |device| {
                let mut arena = device.reserve("weights", SOME).unwrap();
                arena.commit(old).unwrap();
                fill(device, &mut arena, 1);
                let mut staged = committed(device, "staged", SOME);
                fill(device, &mut staged, 2);
                (arena, Some(staged))
            },
            |device, (arena, staged)| {
                let staged = staged.take().unwrap_or_else(|| {
                    let mut staged = committed(device, "staged", SOME);
                    fill(device, &mut staged, 2);
                    staged
                });
                arena.adopt(staged)
            },
            |emulated, device, (arena, _), succeeded| {
                assert_eq!(arena.committed(), if succeeded { SOME } else { old });
                assert!(all(device, arena, if succeeded { 2 } else { 1 }));
                // What could not be given back is tried again at the next occasion.
                let whole = arena.committed().next_multiple_of(4096) as u64;
                assert!(emulated.used() <= whole + SOME.next_multiple_of(4096) as u64);
            },
        );
    }
}

#[test]
fn c13_every_call_of_a_decommit_fails_once_and_memory_is_given_back_at_the_next_occasion() {
    every_call_fails_once(
        |device| committed(device, "test", SOME),
        |_, arena| {
            arena.decommit();
            Ok(())
        },
        |emulated, device, arena, _| {
            // A commit takes nothing beside what is left over.
            arena.commit(SOME).unwrap();
            assert_eq!(emulated.used(), SOME.next_multiple_of(4096) as u64);
            assert!(all(device, arena, 0));
        },
    );
}

#[test]
fn c13_every_call_of_a_transfer_fails_once_and_another_try_works() {
    every_call_fails_once(
        |device| committed(device, "test", 5 * MIB),
        |device, arena| {
            let mut noise = Noise::new(7);
            let bytes = noise.bytes(8);
            let contents: Vec<u8> = bytes.iter().copied().cycle().take(5 * MIB).collect();
            device.write_bytes(arena.view_mut(0, 5 * MIB), &contents)?;
            let mut out = vec![0; 5 * MIB];
            device.read_bytes(arena.view(0, 5 * MIB), &mut out)?;
            assert!(out == contents, "what came back without an error is what was sent");
            let mut same = false;
            device.with_host(arena.view(0, MIB), &mut |x| {
                same = encode(crate::weights::DType::F32, x) == contents[..4 * MIB];
            })?;
            assert!(same);
            Ok(())
        },
        |_, _, _, _| {},
    );
}

#[test]
fn c13_a_gpu_that_is_lost_is_an_error_each_time_and_dropping_is_quiet() {
    for n in 1..60 {
        let (emulated, device) = emulated_gpu();
        let mut arena = device.reserve("test", SOME).unwrap();
        let mut parked = device.host_buffer("parked weights", SOME).unwrap();
        emulated.lose(n, ILLEGAL_ADDRESS);
        let mut outcomes = Vec::new();
        outcomes.push(arena.commit(SOME).map_err(|error| error.to_string()));
        let len = arena.committed();
        let contents = vec![1; len];
        outcomes.push(device.write_bytes(arena.view_mut(0, len), &contents).map_err(|e| e.to_string()));
        let out = &mut parked.as_mut_slice()[..len];
        outcomes.push(device.read_bytes(arena.view(0, len), out).map_err(|error| error.to_string()));
        assert!(
            outcomes.iter().flat_map(|outcome| outcome.as_ref().err()).all(|text| text.contains("(700)"))
        );
        emulated.lose(1, ILLEGAL_ADDRESS);
        arena.decommit();
        assert_eq!(device.memory(), None);
        drop((arena, parked, device));
        emulated.find_again();
        let violations = emulated.violations();
        assert!(violations.is_empty(), "lost at call {n}: {violations:?}");
    }
}
