//! Writing the paged cache.
#![allow(unsafe_code, reason = "threads write the regions of different heads")]

use super::host::SharedMut;
use super::pool::Pool;
use crate::device::{HeadShape, KvShape};

/// Stores of fewer elements run on the caller's thread.
const PARALLEL_FROM: usize = 32 << 10;

/// Writes the key and value heads of each row into its slot.
pub(super) fn store(
    pool: &Pool,
    qkv: &[f32],
    shape: HeadShape,
    slots: &[u32],
    (keys, values, cache): (&mut [f32], &mut [f32], KvShape),
) {
    assert_eq!(qkv.len(), slots.len() * shape.width(), "a slot for each row");
    assert_eq!((cache.kv_heads, cache.head_dim), (shape.kv_heads, shape.head_dim), "the cache's heads");
    assert_eq!(keys.len(), cache.layer_elements(), "the keys of a layer");
    assert_eq!(values.len(), cache.layer_elements(), "the values of a layer");
    let slot_count = cache.num_blocks * cache.block_size;
    assert!(slots.iter().all(|&slot| (slot as usize) < slot_count), "slots exist");
    let (keys, values) = (SharedMut::new(keys), SharedMut::new(values));
    let head_elements = cache.block_size * cache.head_dim;
    let store_head = |head: usize| {
        for (row, &slot) in qkv.chunks_exact(shape.width()).zip(slots) {
            let (block, offset) = (slot as usize / cache.block_size, slot as usize % cache.block_size);
            let start = (block * cache.kv_heads + head) * head_elements;
            let (_, heads) = row.split_at(shape.q_width());
            let (key_heads, value_heads) = heads.split_at(shape.kv_heads * shape.head_dim);
            let head = head * shape.head_dim..(head + 1) * shape.head_dim;
            // SAFETY: no other task writes this head.
            let (keys, values) =
                unsafe { (keys.part(start, head_elements), values.part(start, head_elements)) };
            for (to, from) in
                keys[offset..].iter_mut().step_by(cache.block_size).zip(&key_heads[head.clone()])
            {
                *to = *from;
            }
            values[offset * shape.head_dim..][..shape.head_dim].copy_from_slice(&value_heads[head]);
        }
    };
    if qkv.len() < PARALLEL_FROM {
        (0..shape.kv_heads).for_each(store_head);
    } else {
        pool.for_each(shape.kv_heads, &store_head);
    }
}

/// Copies whole blocks, in order.
pub(super) fn copy_blocks((keys, values, cache): (&mut [f32], &mut [f32], KvShape), copies: &[(u32, u32)]) {
    assert_eq!(keys.len(), cache.layer_elements(), "the keys of a layer");
    assert_eq!(values.len(), cache.layer_elements(), "the values of a layer");
    let elements = cache.block_elements();
    for &(from, to) in copies {
        let (from, to) = (from as usize * elements, to as usize * elements);
        keys.copy_within(from..from + elements, to);
        values.copy_within(from..from + elements, to);
    }
}
