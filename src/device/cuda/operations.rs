//! The operations, each a launch or two.
#![allow(unsafe_code, reason = "launches of kernels")]

use std::ops::Range;

use super::graphs::Graphs;
use super::kernels::{Arguments, Kernel, Shape};
use super::pinned::Pinned;
use super::step::{self, CHUNK, StepLayout, heads_per_tile, packed_bytes, partials_bytes};
use super::{ALIGNMENT, CudaDevice};
use crate::device::cpu::HostBuffer;
use crate::device::{
    Arena, AttentionScores, Device, DeviceError, DeviceMemory, HeadShape, KvLayer, KvLayerMut, LogitsReader,
    Matrix, MatrixShape, Output, QkNorm, Recorder, Step, StepBytes, StepLimits, Vector, View, ViewMut,
    WeightWorkspace,
};
use crate::weights::DType;

/// Rows of the batch of a block of the narrow product; as in `kernels/matmul.cu`.
const NARROW_ROWS: usize = 32;
/// Rows up to which the narrow product may read weights once more for each block of the batch.
const MOST_NARROW_ROWS: usize = 256;
/// Output rows of a block of the narrow product, and its threads.
const NARROW_OUT: usize = 16;
/// Output rows and rows of the batch of a block of the wide product.
const WIDE_OUT: usize = 128;
const WIDE_ROWS: usize = 64;
/// Threads of a block of either.
const MATMUL_BLOCK: u32 = 256;
/// Dimensions of a head that the attention kernels take.
const MAX_HEAD_DIM: usize = 256;
/// Blocks in the second dimension of a grid, at most.
const MAX_GRID_Y: usize = 65_535;

pub(super) fn dtype_code(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Bf16 => 2,
    }
}

fn assert_vector(vector: &Vector<'_>) {
    assert_eq!(vector.bytes.len(), vector.len * vector.dtype.size(), "a vector's bytes are its elements");
}

fn assert_matrix(matrix: &Matrix<'_>) {
    let packed = super::packed_bytes(matrix.shape);
    assert_eq!(matrix.bytes.len(), packed, "a packed matrix has the size of its shape");
}

/// Threads of a block for `elements`: whole warps, at most 256.
fn block_for(elements: usize) -> u32 {
    u32::try_from(elements.next_multiple_of(32).clamp(32, 256)).expect("at most 256")
}

impl CudaDevice {
    /// # Safety
    /// As [`Kernel::launch`]; the addresses are of views that this call has borrowed, or of the step's memory. They
    /// stay until the stream is done, since arenas wait for it before their memory goes.
    pub(super) unsafe fn launch(
        &self,
        operation: &'static str,
        kernel: Kernel,
        shape: Shape,
        arguments: Arguments,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        let launched = unsafe { kernel.launch(&self.context, &self.stream, shape, arguments) };
        launched.map_err(|error| error.during(operation))
    }

    /// The attention kernels' common arguments.
    fn attention_arguments(
        step: &Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        scores: AttentionScores,
        cache: &KvLayer<'_>,
    ) -> Arguments {
        let layout = StepLayout::of(&step.inputs);
        let memory = step.memory.address();
        Arguments::new()
            .address(qkv.address())
            .int(shape.q_heads)
            .int(shape.kv_heads)
            .int(shape.head_dim)
            .address(cache.keys.address())
            .address(cache.values.address())
            .int(cache.shape.block_size)
            .address(memory + layout.tiles)
            .address(memory + layout.tables)
            .float(scores.scale)
            .int(window_argument(scores))
            .int(heads_per_tile(shape))
    }

    fn check_attention(
        step: &Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        cache: &KvLayer<'_>,
        out: &ViewMut<'_, f32>,
    ) {
        let rows = qkv.len() / shape.width();
        assert_eq!(step.inputs.heads, shape, "the step's tiles are made for these heads");
        assert_eq!(qkv.len(), rows * shape.width(), "the input has whole rows");
        assert_eq!(out.len(), rows * shape.q_width(), "the output has a row for each row of input");
        assert!(shape.q_heads.is_multiple_of(shape.kv_heads), "query heads share key heads evenly");
        assert_eq!(
            (cache.shape.kv_heads, cache.shape.head_dim),
            (shape.kv_heads, shape.head_dim),
            "the cache's heads"
        );
        for span in step.inputs.spans.iter().filter(|span| span.rows > 0) {
            assert!(span.first_row + span.rows <= rows, "a span's rows exist");
            let last = (span.first_position + span.rows - 1) / cache.shape.block_size;
            assert!(last < span.block_table.len(), "a span's table covers its positions");
        }
    }
}

fn window_argument(scores: AttentionScores) -> usize {
    // A window that no position fills is none.
    scores.window.filter(|&window| u32::try_from(window).is_ok()).unwrap_or(0)
}

/// Dynamic shared memory of the attention kernels; as `kernels/attention.cu` says.
fn attention_shared_bytes(shape: HeadShape, tile_entries: usize, sums: bool) -> u32 {
    let entries = tile_entries.next_power_of_two();
    let stride = if entries < 8 { entries } else { entries + 4 };
    let queries = entries * shape.head_dim;
    let floats = queries + CHUNK * stride + if sums { queries } else { 0 };
    u32::try_from(floats * 4).expect("tiles are small")
}

impl Device for CudaDevice {
    fn reserve(&self, label: &'static str, bytes: usize) -> Result<Arena, DeviceError> {
        self.reserve_pages(label, bytes)
    }

    fn check_heads(&self, heads: HeadShape) -> Result<(), DeviceError> {
        if heads.head_dim > MAX_HEAD_DIM {
            let detail = format!("heads have {} dimensions, {MAX_HEAD_DIM} at most", heads.head_dim);
            return Err(DeviceError::Operation { operation: "attention", detail });
        }
        Ok(())
    }

    fn logit_rows(&self) -> usize {
        128
    }

    fn matrix_bytes(&self, shape: MatrixShape) -> usize {
        super::packed_bytes(shape)
    }

    fn packed_rows(&self) -> usize {
        16
    }

    fn write_rows(
        &self,
        dst: ViewMut<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        src: &[u8],
    ) -> Result<(), DeviceError> {
        self.pack_rows(dst, shape, first_row, src)
    }

    fn read_rows(
        &self,
        src: View<'_, u8>,
        shape: MatrixShape,
        first_row: usize,
        out: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.unpack_rows(src, shape, first_row, out)
    }

    fn copy_bytes(&self, dst: ViewMut<'_, u8>, src: View<'_, u8>) -> Result<(), DeviceError> {
        self.copy(dst, src)
    }

    fn write_bytes(&self, dst: ViewMut<'_, u8>, src: &[u8]) -> Result<(), DeviceError> {
        self.write(dst, src)
    }

    fn read_bytes(&self, src: View<'_, u8>, out: &mut [u8]) -> Result<(), DeviceError> {
        self.read(src, out)
    }

    fn commit_with(&self, arena: &mut Arena, contents: &[u8]) -> Result<(), DeviceError> {
        self.restore(arena, contents)
    }

    fn host_buffer(&self, label: &'static str, bytes: usize) -> Result<HostBuffer, DeviceError> {
        self.parking.lend(label, bytes)
    }

    fn staging_bytes(&self) -> (u64, u64) {
        let results = self.results.lock().as_ref().map_or(0, Pinned::len);
        let ring = self.ring.lock().all_bytes();
        let rows = self.rows.lock().committed() as u64;
        (self.parking.kept_bytes() + (ring + results) as u64, rows)
    }

    fn end_transfer(&self) {
        // Giving memory back waits for the stream, which a recording can't.
        let _running = self.recording.read();
        self.rows.lock().decommit();
    }

    fn memory(&self) -> Option<DeviceMemory> {
        let memory = self.context.memory().inspect_err(|error| tracing::warn!(%error, "the GPU's memory"));
        memory.ok().map(|(free_bytes, total_bytes)| DeviceMemory { free_bytes, total_bytes })
    }

    fn weight_workspace(&self, bytes: usize) -> Result<Option<Box<dyn WeightWorkspace + '_>>, DeviceError> {
        self.open_workspace(bytes).map(|workspace| Some(workspace as Box<dyn WeightWorkspace>))
    }

    fn shares_host_memory(&self) -> bool {
        false
    }

    fn step_bytes(&self, limits: &StepLimits) -> StepBytes {
        step::step_bytes(limits)
    }

    fn recorder(&self) -> Box<dyn Recorder> {
        Box::new(Graphs::new(&self.context, &self.stream, &self.recording))
    }

    fn begin_step(&self, step: &mut Step<'_>) -> Result<(), DeviceError> {
        let layout = StepLayout::of(&step.inputs);
        let cols = step.inputs.angles.cos.len();
        assert_eq!(cols, step.inputs.angles.sin.len(), "a sine for each cosine");
        assert!(step.memory.address().is_multiple_of(ALIGNMENT), "a step's memory is aligned");
        if step.memory.len() < layout.end {
            let detail = format!("{} bytes of inputs, {} at most", layout.end, step.memory.len());
            return Err(DeviceError::Operation { operation: "begin_step", detail });
        }
        let mut bytes = vec![0; layout.end];
        step::write(&step.inputs, &layout, &mut bytes);
        self.write(step.memory.slice(0, layout.end), &bytes)
    }

    fn embed(&self, step: &Step<'_>, table: Matrix<'_>, out: ViewMut<'_, f32>) -> Result<(), DeviceError> {
        assert_matrix(&table);
        let (tokens, MatrixShape { rows, cols, dtype }) = (step.inputs.tokens, table.shape);
        assert_eq!(out.len(), tokens.len() * cols, "a row for each token");
        assert!(tokens.iter().all(|&token| (token as usize) < rows), "tokens are in the vocabulary");
        let layout = StepLayout::of(&step.inputs);
        let arguments = Arguments::new()
            .address(table.bytes.address())
            .int(dtype_code(dtype))
            .int(cols)
            .address(step.memory.address() + layout.tokens)
            .address(out.address());
        let shape = Shape::new([tokens.len(), 1, 1], block_for(cols));
        // SAFETY: `embed`'s arguments; the tokens are in the vocabulary and the output has their rows.
        unsafe { self.launch("embed", self.kernels.embed, shape, arguments) }
    }

    fn rms_norm(
        &self,
        x: View<'_, f32>,
        weight: Vector<'_>,
        eps: f32,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        assert_vector(&weight);
        let rows = x.len() / weight.len;
        assert_eq!((x.len(), out.len()), (rows * weight.len, x.len()), "whole rows go in and out");
        let arguments = Arguments::new()
            .address(x.address())
            .address(weight.bytes.address())
            .int(dtype_code(weight.dtype))
            .float(eps)
            .int(weight.len)
            .address(out.address());
        let shape = Shape::new([rows, 1, 1], block_for(weight.len));
        // SAFETY: `rms_norm`'s arguments, with rows of the weight's length.
        unsafe { self.launch("rms_norm", self.kernels.rms_norm, shape, arguments) }
    }

    fn matmul(
        &self,
        step: &mut Step<'_>,
        x: View<'_, f32>,
        w: Matrix<'_>,
        bias: Option<Vector<'_>>,
        output: Output,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        assert_matrix(&w);
        let MatrixShape { rows, cols, dtype } = w.shape;
        let batch = x.len() / cols;
        assert_eq!((x.len(), out.len()), (batch * cols, batch * rows), "whole rows go in and out");
        if let Some(bias) = &bias {
            assert_vector(bias);
            assert_eq!(bias.len, rows, "a bias for each output column");
        }
        let (packed, room) = (step.scratch.address(), step.scratch.len());
        assert!(packed_bytes(batch, cols) <= room, "scratch memory has room for the packed activations");
        let arguments = Arguments::new().address(x.address()).int(batch).int(cols).address(packed);
        let tiles = batch.div_ceil(8) * cols.div_ceil(16);
        let grid = [tiles.div_ceil(8), 1, 1];
        // SAFETY: `pack_activations`' arguments; the room for its output was checked.
        unsafe {
            self.launch("matmul", self.kernels.pack_activations, Shape::new(grid, MATMUL_BLOCK), arguments)
        }?;
        // The bits are the same: the wide product is for when there are enough of its larger blocks.
        let wide_blocks = rows.div_ceil(WIDE_OUT) * batch.div_ceil(WIDE_ROWS);
        let few = wide_blocks < self.context.multiprocessors as usize;
        let narrow = batch <= NARROW_ROWS || (batch <= MOST_NARROW_ROWS && few);
        let kernels = &self.kernels;
        let kernel = match (dtype, narrow) {
            (DType::Bf16, true) => kernels.matmul_bf16_narrow,
            (DType::Bf16, false) => kernels.matmul_bf16_wide,
            (DType::F16, true) => kernels.matmul_f16_narrow,
            (DType::F16, false) => kernels.matmul_f16_wide,
            (DType::F32, true) => kernels.matmul_f32_narrow,
            (DType::F32, false) => kernels.matmul_f32_wide,
        };
        let grid = match narrow {
            true => [rows.div_ceil(NARROW_OUT), batch.div_ceil(NARROW_ROWS), 1],
            false => [wide_blocks, 1, 1],
        };
        let arguments = Arguments::new()
            .address(w.bytes.address())
            .address(packed)
            .int(rows)
            .int(cols)
            .int(batch)
            .address(bias.map_or(0, |bias| bias.bytes.address()))
            .int(bias.map_or(0, |bias| dtype_code(bias.dtype)))
            .int(usize::from(output == Output::Add))
            .address(out.address());
        // SAFETY: the product's arguments; all shapes were checked.
        unsafe { self.launch("matmul", kernel, Shape::new(grid, MATMUL_BLOCK), arguments) }
    }

    fn rope(
        &self,
        step: &Step<'_>,
        qkv: ViewMut<'_, f32>,
        shape: HeadShape,
        norm: Option<QkNorm<'_>>,
    ) -> Result<(), DeviceError> {
        let rows = qkv.len() / shape.width();
        let angles = step.inputs.angles;
        assert_eq!(qkv.len(), rows * shape.width(), "the input has whole rows");
        assert_eq!(angles.cos.len(), rows * shape.head_dim / 2, "an angle for each pair of a row");
        let layout = StepLayout::of(&step.inputs);
        let memory = step.memory.address();
        let mut arguments = Arguments::new()
            .address(qkv.address())
            .int(shape.q_heads)
            .int(shape.kv_heads)
            .int(shape.head_dim)
            .address(memory + layout.cos)
            .address(memory + layout.sin);
        let heads = shape.q_heads + shape.kv_heads;
        let Some(norm) = norm else {
            let blocks = (heads * shape.head_dim / 2).div_ceil(256).max(1);
            let launch = Shape::new([rows, blocks, 1], 256);
            // SAFETY: `rope`'s arguments, with angles for all rows.
            return unsafe { self.launch("rope", self.kernels.rope, launch, arguments) };
        };
        for vector in [&norm.q, &norm.k] {
            assert_vector(vector);
            assert_eq!(vector.len, shape.head_dim, "norms are of head_dim");
            arguments = arguments.address(vector.bytes.address()).int(dtype_code(vector.dtype));
        }
        let launch = Shape::new([rows, heads.div_ceil(4), 1], 128);
        // SAFETY: `qk_norm_rope`'s arguments, with angles for all rows and norms of the heads' length.
        unsafe { self.launch("rope", self.kernels.qk_norm_rope, launch, arguments.float(norm.eps)) }
    }

    fn store_kv(
        &self,
        step: &Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        cache: KvLayerMut<'_>,
    ) -> Result<(), DeviceError> {
        let slots = step.inputs.slots;
        assert_eq!(qkv.len(), slots.len() * shape.width(), "a slot for each row");
        let (kv_heads, head_dim) = (cache.shape.kv_heads, cache.shape.head_dim);
        assert_eq!((kv_heads, head_dim), (shape.kv_heads, shape.head_dim), "the cache's heads");
        let slot_count = cache.shape.num_blocks * cache.shape.block_size;
        assert!(slots.iter().all(|&slot| (slot as usize) < slot_count), "slots exist");
        let layout = StepLayout::of(&step.inputs);
        let arguments = Arguments::new()
            .address(qkv.address())
            .int(shape.q_heads)
            .int(shape.kv_heads)
            .int(shape.head_dim)
            .address(step.memory.address() + layout.slots)
            .address(cache.keys.address())
            .address(cache.values.address())
            .int(cache.shape.block_size);
        let launch = Shape::new([slots.len(), 1, 1], block_for(kv_heads * head_dim));
        // SAFETY: `store_kv`'s arguments; the slots exist.
        unsafe { self.launch("store_kv", self.kernels.store_kv, launch, arguments) }
    }

    fn attention(
        &self,
        step: &mut Step<'_>,
        qkv: View<'_, f32>,
        shape: HeadShape,
        scores: AttentionScores,
        cache: KvLayer<'_>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        Self::check_attention(step, qkv, shape, &cache, &out);
        let (room_address, room) = (step.scratch.address(), step.scratch.len());
        let inputs = &step.inputs;
        let heads = heads_per_tile(shape);
        let tiles = step::tile_count(inputs);
        let groups = shape.kv_heads * (shape.q_heads / shape.kv_heads).div_ceil(heads);
        // Blocks of chunks that no sequence has end at once.
        let chunks = step::rounded_chunks(step::longest(inputs));
        let rows = qkv.len() / shape.width();
        let entries =
            inputs.spans.iter().map(|span| span.rows).max().unwrap_or(0).min(step::tile_rows(shape)) * heads;
        let arguments = Self::attention_arguments(step, qkv, shape, scores, &cache);
        // Cutting sequences in chunks pays if there are not enough blocks without, and the bits are the same.
        let few = tiles * groups < 4 * self.context.multiprocessors as usize;
        let partials = partials_bytes(rows * shape.q_heads, chunks, shape.head_dim);
        if !few || !(2..=MAX_GRID_Y).contains(&chunks) || partials > room {
            let launch = Shape {
                shared_bytes: attention_shared_bytes(shape, entries, true),
                ..Shape::new([tiles, groups, 1], CHUNK as u32)
            };
            let arguments = arguments.address(out.address());
            // SAFETY: `attention_whole`'s arguments; spans, tables and shapes were checked.
            return unsafe { self.launch("attention", self.kernels.attention_whole, launch, arguments) };
        }
        let launch = Shape {
            shared_bytes: attention_shared_bytes(shape, entries, false),
            ..Shape::new([tiles, groups, chunks], CHUNK as u32)
        };
        let arguments = arguments.int(chunks).address(room_address);
        // SAFETY: `attention_split`'s arguments; the room for its output was checked too.
        unsafe { self.launch("attention", self.kernels.attention_split, launch, arguments) }?;
        let layout = StepLayout::of(&step.inputs);
        let arguments = Arguments::new()
            .address(room_address)
            .int(shape.q_heads)
            .int(shape.kv_heads)
            .int(shape.head_dim)
            .address(step.memory.address() + layout.tiles)
            .int(window_argument(scores))
            .int(heads)
            .int(chunks)
            .address(out.address());
        let launch = Shape::new([tiles, groups, entries.max(1)], CHUNK as u32);
        // SAFETY: `attention_combine`'s arguments, for the same tiles.
        unsafe { self.launch("attention", self.kernels.attention_combine, launch, arguments) }
    }

    fn silu_mul(
        &self,
        gate_up: View<'_, f32>,
        width: usize,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        let rows = out.len() / width;
        assert_eq!((out.len(), gate_up.len()), (rows * width, 2 * rows * width), "whole rows go in and out");
        for first in (0..rows).step_by(MAX_GRID_Y) {
            let rows = MAX_GRID_Y.min(rows - first);
            let arguments = Arguments::new()
                .address(gate_up.slice(2 * first * width, 2 * rows * width).address())
                .int(width)
                .address(out.address() + first * width * size_of::<f32>());
            let shape = Shape::new([width.div_ceil(256), rows, 1], 256);
            // SAFETY: `silu_mul`'s arguments, for rows that both views have.
            unsafe { self.launch("silu_mul", self.kernels.silu_mul, shape, arguments) }?;
        }
        Ok(())
    }

    fn gather_rows(
        &self,
        step: &Step<'_>,
        x: View<'_, f32>,
        dim: usize,
        wanted: Range<usize>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), DeviceError> {
        let rows = &step.inputs.logit_rows[wanted.clone()];
        assert_eq!(out.len(), rows.len() * dim, "a row for each index");
        assert!(rows.iter().all(|&row| (row as usize + 1) * dim <= x.len()), "the rows exist");
        let layout = StepLayout::of(&step.inputs);
        let arguments = Arguments::new()
            .address(x.address())
            .int(dim)
            .address(step.memory.address() + layout.logit_rows + 4 * wanted.start)
            .address(out.address());
        let shape = Shape::new([rows.len(), 1, 1], block_for(dim));
        // SAFETY: `gather_rows`' arguments; the rows exist.
        unsafe { self.launch("gather_rows", self.kernels.gather_rows, shape, arguments) }
    }

    fn copy_blocks(&self, step: &Step<'_>, cache: KvLayerMut<'_>) -> Result<(), DeviceError> {
        let copies = step.inputs.copies;
        let blocks = cache.shape.num_blocks;
        let exist = |&(from, to): &(u32, u32)| (from as usize) < blocks && (to as usize) < blocks;
        assert!(copies.iter().all(exist), "blocks exist");
        if copies.is_empty() {
            return Ok(());
        }
        let layout = StepLayout::of(&step.inputs);
        let elements = cache.shape.block_elements();
        let arguments = Arguments::new()
            .address(cache.keys.address())
            .address(cache.values.address())
            .address(step.memory.address() + layout.copies)
            .int(copies.len())
            .int(elements);
        let shape = Shape::new([elements.div_ceil(256), 1, 1], 256);
        // SAFETY: `copy_blocks`' arguments; the blocks exist.
        unsafe { self.launch("copy_blocks", self.kernels.copy_blocks, shape, arguments) }
    }

    fn with_host(&self, view: View<'_, f32>, f: &mut dyn FnMut(&[f32])) -> Result<(), DeviceError> {
        self.show(view, f)
    }

    fn read_logits(
        &self,
        step: &mut Step<'_>,
        logits: ViewMut<'_, f32>,
        vocab: usize,
        first: usize,
        reader: &dyn LogitsReader,
    ) -> Result<(), DeviceError> {
        self.answer_queries(step, logits, vocab, first, reader)
    }

    fn share_out(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.host.share_out(count, work);
    }
}
