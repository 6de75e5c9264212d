//! The kernels: fat binaries built ahead from `kernels/*.cu`, loaded once for each device.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::context::Context;
use super::driver::{CUDA_KERNEL_NODE_PARAMS, CUfunction, CUmodule};
use super::error::CallError;
use super::stream::Stream;

/// Shape of a launch: blocks, threads of a block, bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    pub(super) shared_bytes: u32,
}

impl Shape {
    /// Blocks in a row, no dynamic shared memory.
    pub(super) fn new(grid: [usize; 3], block: u32) -> Self {
        let grid = grid.map(|blocks| u32::try_from(blocks).expect("a grid is counted in 32 bits"));
        Self { grid, block, shared_bytes: 0 }
    }
}

/// The arguments of a launch, in order.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    /// Each in the low bytes of a word.
    words: Vec<u64>,
}

impl Arguments {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn address(mut self, address: usize) -> Self {
        self.words.push(address as u64);
        self
    }

    /// A `uint32_t`.
    pub(super) fn int(mut self, value: usize) -> Self {
        self.words.push(u64::from(u32::try_from(value).expect("kernels count in 32 bits")));
        self
    }

    /// A `uint64_t`.
    pub(super) fn long(mut self, value: usize) -> Self {
        self.words.push(value as u64);
        self
    }

    /// A `float`.
    pub(super) fn float(mut self, value: f32) -> Self {
        self.words.push(u64::from(value.to_bits()));
        self
    }
}

/// A fat binary, aligned as the compiler's own are.
#[repr(C, align(64))]
struct Image<Bytes>(Bytes);

#[derive(Debug)]
struct Module {
    context: Arc<Context>,
    module: CUmodule,
}

impl Module {
    fn load(context: &Arc<Context>, image: &'static [u8]) -> Result<Self, CallError> {
        let _bound = context.bind()?;
        let mut module = null_mut();
        // SAFETY: `module` is ours to write; the image is a whole fat binary, and `Drop` unloads the module.
        unsafe { context.driver.cuModuleLoadData(&raw mut module, image.as_ptr().cast()) }?;
        Ok(Self { context: Arc::clone(context), module })
    }

    fn function(&self, name: &str) -> Result<CUfunction, CallError> {
        let _bound = self.context.bind()?;
        let name = CString::new(name).expect("kernels have plain names");
        let mut function = null_mut();
        // SAFETY: `function` is ours to write; the module is alive and the name ends with a zero.
        unsafe { self.context.driver.cuModuleGetFunction(&raw mut function, self.module, name.as_ptr()) }?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unload = || {
            let _bound = self.context.bind_to_end()?;
            // SAFETY: loaded by `load`, unloaded once; the device has waited for its streams.
            unsafe { self.context.driver.cuModuleUnload(self.module) }
        };
        if let Err(error) = unload() {
            tracing::warn!(%error, "a module was not unloaded");
        }
    }
}

/// A kernel that can be launched; [`Kernels`] keeps its module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    function: CUfunction,
}

impl Kernel {
    /// Puts a launch on the stream, or in the graph that it records.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number and type; every address is of this device (or pinned
    /// host memory), holds what the kernel reads and writes there for this shape, and stays so until the launch
    /// has run.
    pub(super) unsafe fn launch(
        &self,
        context: &Context,
        stream: &Stream,
        shape: Shape,
        mut arguments: Arguments,
    ) -> Result<(), CallError> {
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let mut parameters: Vec<*mut c_void> =
            arguments.words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        let [x, y, z] = shape.grid;
        let _bound = context.bind()?;
        let mut recording = stream.recording();
        let Some(recording) = &mut *recording else {
            let (parameters, extra) = (parameters.as_mut_ptr(), null_mut());
            let (block, shared, raw) = (shape.block, shape.shared_bytes, stream.raw());
            // SAFETY: the driver copies the arguments before it returns; the rest is the caller's promise.
            return unsafe {
                context.driver.cuLaunchKernel(
                    self.function,
                    x,
                    y,
                    z,
                    block,
                    1,
                    1,
                    shared,
                    raw,
                    parameters,
                    extra,
                )
            };
        };
        let launch = CUDA_KERNEL_NODE_PARAMS {
            func: self.function,
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: shape.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            kernelParams: parameters.as_mut_ptr(),
            extra: null_mut(),
            kern: null_mut(),
            ctx: null_mut(),
        };
        let (before, count) = (recording.last, usize::from(!recording.last.is_null()));
        // SAFETY: as above; the graph and the node before are those of the recording.
        unsafe {
            context.driver.cuGraphAddKernelNode_v2(
                &raw mut recording.last,
                recording.graph,
                &raw const before,
                count,
                &raw const launch,
            )
        }
    }
}

/// Declares the kernels of each file.
macro_rules! kernels {
    ($($file:literal { $($(#[$attribute:meta])* $name:ident),* $(,)? })*) => {
        /// All kernels of the device.
        #[derive(Debug)]
        pub(super) struct Kernels {
            $($($(#[$attribute])* pub(super) $name: Kernel,)*)*
            _modules: Vec<Module>,
        }

        impl Kernels {
            /// Loads every file.
            pub(super) fn load(context: &Arc<Context>) -> Result<Self, CallError> {
                let mut modules = Vec::new();
                $(
                    let module = {
                        const BYTES: &[u8] =
                            include_bytes!(concat!("../../../kernels/fatbin/", $file, ".fatbin"));
                        static IMAGE: Image<[u8; BYTES.len()]> =
                            Image(*include_bytes!(concat!("../../../kernels/fatbin/", $file, ".fatbin")));
                        Module::load(context, &IMAGE.0)?
                    };
                    $($(#[$attribute])* let $name = Kernel { function: module.function(stringify!($name))? };)*
                    modules.push(module);
                )*
                Ok(Self { $($($(#[$attribute])* $name,)*)* _modules: modules })
            }
        }
    };
}

kernels! {
    "pack" { pack_rows_16, pack_rows_32, unpack_rows_16, unpack_rows_32, convert, first_non_finite }
    "digest" { xxh3_leaves }
    "embed" { embed, gather_rows }
    "norm" { rms_norm }
    "rope" { rope, qk_norm_rope }
    "mlp" { silu_mul }
    "kv" {
        store_kv,
        copy_blocks,
        // For tiers of the cache, which do not exist yet.
        #[cfg(test)] gather_blocks,
        #[cfg(test)] scatter_blocks,
    }
    "matmul" {
        pack_activations,
        matmul_bf16_narrow,
        matmul_bf16_wide,
        matmul_f16_narrow,
        matmul_f16_wide,
        matmul_f32_narrow,
        matmul_f32_wide,
    }
    "sampling" { sample_rows }
    "attention" { attention_split, attention_combine, attention_whole }
}

// SAFETY: a function may be launched from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}
