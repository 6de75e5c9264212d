//! Blocks of the cache to and from one flat buffer.
#![allow(unsafe_code, reason = "launches of kernels")]

use super::gpu;
use crate::device::cpu::tests::rig::{Noise, f32_arena, read_f32};
use crate::device::cuda::kernels::{Arguments, Kernel, Shape};

#[test]
fn blocks_are_gathered_and_scattered() {
    let (emulated, gpu) = gpu();
    let (count, elements) = (7, 37);
    let (keys, values) = (Noise::new(1).vec(count * elements), Noise::new(2).vec(count * elements));
    let wanted = [5_u32, 0, 3];
    let list: Vec<f32> = wanted.iter().map(|&block| f32::from_bits(block)).collect();
    let [key_arena, value_arena, list] = [&keys, &values, &list].map(|x| f32_arena(&gpu, x));
    let [flat, other_keys, other_values] = [wanted.len() * 2 * elements, count * elements, count * elements]
        .map(|len| f32_arena(&gpu, &vec![0.0; len]));
    let run = |kernel: Kernel, addresses: [usize; 3]| {
        let [keys, values, blocks] = addresses;
        let arguments = Arguments::new().address(keys).address(values).address(blocks);
        let arguments = arguments.int(wanted.len()).int(elements).address(flat.address());
        // SAFETY: the kernels' arguments, with memory for all blocks; the arenas are alive until the end.
        let launched =
            unsafe { kernel.launch(&gpu.context, &gpu.stream, Shape::new([2, 3, 1], 64), arguments) };
        launched.unwrap();
    };
    run(gpu.kernels.gather_blocks, [key_arena.address(), value_arena.address(), list.address()]);
    let gathered = read_f32(&gpu, &flat, wanted.len() * 2 * elements);
    for (at, &block) in wanted.iter().enumerate() {
        let from = block as usize * elements..(block as usize + 1) * elements;
        let (own_keys, own_values) = gathered[at * 2 * elements..][..2 * elements].split_at(elements);
        assert_eq!((own_keys, own_values), (&keys[from.clone()], &values[from]), "block {block}");
    }
    run(gpu.kernels.scatter_blocks, [other_keys.address(), other_values.address(), list.address()]);
    for (arena, source) in [(&other_keys, &keys), (&other_values, &values)] {
        let scattered = read_f32(&gpu, arena, count * elements);
        for block in 0..count {
            let range = block * elements..(block + 1) * elements;
            let expected = match wanted.contains(&(block as u32)) {
                true => source[range.clone()].to_vec(),
                false => vec![0.0; elements],
            };
            assert_eq!(scattered[range], expected, "block {block}");
        }
    }
    drop((key_arena, value_arena, list, flat, other_keys, other_values, gpu));
    emulated.assert_clean();
}
