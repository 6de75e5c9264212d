//! Arenas: memory leaves and comes back, contents move, limits and faults leave nothing behind.

use super::rig::device as new_device;
use crate::device::cpu::budget::resident_bytes;
use crate::device::cpu::{CpuDevice, CpuOptions, SimdPath};
use crate::device::{Arena, Device, DeviceError};

const MIB: usize = 1 << 20;

fn device(memory_limit_bytes: Option<u64>) -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: 1, simd: SimdPath::Auto, memory_limit_bytes }).unwrap()
}

fn fill(device: &CpuDevice, arena: &mut Arena, byte: u8) {
    let len = arena.committed();
    device.write_bytes(arena.view_mut(0, len), &vec![byte; len]).unwrap();
}

fn all(device: &CpuDevice, arena: &Arena, byte: u8) -> bool {
    let mut bytes = vec![!byte; arena.committed()];
    device.read_bytes(arena.view(0, bytes.len()), &mut bytes).unwrap();
    bytes.iter().all(|&b| b == byte)
}

/// Bytes behind an arena that are resident, from the kernel's own account of each mapping.
fn resident(arena: &Arena, reserved: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut kib) = (false, 0);
    for line in maps.lines() {
        let first = line.split_whitespace().next().unwrap();
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|edge| usize::from_str_radix(edge, 16).unwrap());
            inside = arena.address() <= start && end <= arena.address() + reserved;
        } else if inside && first == "Rss:" {
            kib += line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap();
        }
    }
    kib << 10
}

#[test]
fn decommitted_memory_is_back_with_the_system_and_comes_back_zeroed_at_its_address() {
    let device = device(None);
    let mut arena = device.reserve("test", 256 * MIB).unwrap();
    let address = arena.address();
    for _ in 0..3 {
        arena.commit(200 * MIB).unwrap();
        assert_eq!(device.budget().committed_bytes(), 200 << 20);
        assert!(all(&device, &arena, 0));
        fill(&device, &mut arena, 7);
        assert_eq!(resident(&arena, 256 * MIB), 200 * MIB);
        let process = resident_bytes().unwrap();
        assert_eq!(arena.decommit(), 200 * MIB);
        assert_eq!(resident(&arena, 256 * MIB), 0);
        // The process as a whole has less, too; other tests come and go meanwhile.
        let fallen = process.saturating_sub(resident_bytes().unwrap());
        assert!(fallen > 100 << 20, "{fallen} bytes went");
        assert_eq!((arena.address(), device.budget().committed_bytes()), (address, 0));
    }
}

#[test]
fn adoption_moves_contents_to_the_old_address() {
    let device = device(None);
    for bytes in [0, 1, 5000, 3 * MIB] {
        let mut arena = device.reserve("weights", bytes + 3 * MIB).unwrap();
        arena.commit(bytes).unwrap();
        fill(&device, &mut arena, 1);
        let address = arena.address();
        for byte in 2..5 {
            let mut staged = device.reserve("staged", bytes).unwrap();
            staged.commit(bytes).unwrap();
            fill(&device, &mut staged, byte);
            arena.adopt(staged).unwrap();
            assert!(all(&device, &arena, byte));
            assert_eq!(arena.address(), address);
        }
        assert_eq!(device.budget().committed_bytes(), bytes.next_multiple_of(4096) as u64);
        // It is an arena like any other: it can leave and come back.
        arena.decommit();
        arena.commit(bytes + 2 * MIB).unwrap();
        assert!(all(&device, &arena, 0));
        drop(arena);
        assert_eq!(device.budget().committed_bytes(), 0);
    }
}

#[test]
fn the_limit_covers_all_arenas() {
    let device = device(Some(64 << 10));
    let mut first = device.reserve("first", 1 << 20).unwrap();
    let mut second = device.reserve("second", 1 << 20).unwrap();
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
}

#[test]
fn more_than_the_system_has_is_refused() {
    let device = device(None);
    let mut arena = device.reserve("huge", 1 << 44).unwrap();
    let refused = arena.commit(1 << 44).unwrap_err();
    assert!(matches!(refused, DeviceError::OutOfMemory { available_bytes: 1.., .. }), "{refused}");
    let refused = device.reserve("absurd", usize::MAX).unwrap_err();
    assert!(matches!(refused, DeviceError::AddressSpace { .. }), "{refused}");
    let refused = device.reserve("absurd", 1 << 60).unwrap_err();
    assert!(matches!(refused, DeviceError::AddressSpace { .. }), "{refused}");
}

#[test]
fn injected_faults_change_nothing() {
    let device = device(None);
    let mut arena = device.reserve("test", 8192).unwrap();
    device.budget().fail_nth(1);
    assert!(matches!(arena.commit(8192), Err(DeviceError::OutOfMemory { .. })));
    assert_eq!((arena.committed(), device.budget().committed_bytes()), (0, 0));
    device.budget().fail_nth(3);
    arena.commit(8192).unwrap();
    fill(&device, &mut arena, 1);
    let mut staged = device.reserve("staged", 8192).unwrap();
    staged.commit(8192).unwrap();
    fill(&device, &mut staged, 2);
    assert!(matches!(arena.adopt(staged), Err(DeviceError::OutOfMemory { .. })));
    assert!(all(&device, &arena, 1));
    assert_eq!(device.budget().committed_bytes(), 8192);
}

#[test]
fn arenas_without_bytes_work() {
    let device = new_device(1, SimdPath::Auto);
    let mut arena = device.reserve("empty", 0).unwrap();
    arena.commit(0).unwrap();
    assert_eq!(arena.view::<f32>(0, 0).len(), 0);
    device.write_bytes(arena.view_mut(0, 0), &[]).unwrap();
    arena.decommit();
    arena.commit(0).unwrap();
}
