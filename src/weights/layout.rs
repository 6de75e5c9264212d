//! Where each tensor of the manifest lies in resident memory: fused matrices, one arena.
//!
//! q, k and v share one matrix, gate and up another, so that a layer is four matrix products. A tied head is
//! the embedding's own matrix. Offsets depend on the configuration and dtypes only, so an address stays valid
//! over every sleep and wake.

use std::collections::HashMap;

use super::{DType, Manifest};
use crate::device::{Device, MatrixShape};
use crate::model::ModelConfig;

/// Vectors and matrices start at multiples of this, in bytes: a cache line, and a CUDA vector load.
const ALIGNMENT: usize = 64;

/// Index into [`WeightLayout::matrices`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MatrixId(usize);

/// Index into [`WeightLayout::vectors`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VectorId(usize);

/// Where a tensor of the manifest goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Rows of a fused or plain matrix, from `first_row`.
    Rows { matrix: MatrixId, first_row: usize },
    /// Elements of a fused or plain vector, from `first_element`.
    Elements { vector: VectorId, first_element: usize },
}

/// A matrix and its place in the arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedMatrix {
    pub(crate) shape: MatrixShape,
    pub(crate) offset_bytes: usize,
    pub(crate) bytes: usize,
}

/// A vector and its place in the arena.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedVector {
    pub(crate) len: usize,
    pub(crate) dtype: DType,
    pub(crate) offset_bytes: usize,
}

/// The parts of one transformer layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LayerLayout {
    pub(crate) input_norm: VectorId,
    pub(crate) qkv: MatrixId,
    pub(crate) qkv_bias: Option<VectorId>,
    pub(crate) qk_norm: Option<(VectorId, VectorId)>,
    pub(crate) o: MatrixId,
    pub(crate) o_bias: Option<VectorId>,
    pub(crate) post_norm: VectorId,
    pub(crate) gate_up: MatrixId,
    pub(crate) gate_up_bias: Option<VectorId>,
    pub(crate) down: MatrixId,
    pub(crate) down_bias: Option<VectorId>,
}

/// The layout of all weights in one arena.
#[derive(Debug)]
pub(crate) struct WeightLayout {
    pub(crate) matrices: Vec<PlacedMatrix>,
    pub(crate) vectors: Vec<PlacedVector>,
    /// Parallel to the manifest's tensors.
    pub(crate) places: Vec<Place>,
    pub(crate) embedding: MatrixId,
    pub(crate) head: MatrixId,
    pub(crate) final_norm: VectorId,
    pub(crate) layers: Vec<LayerLayout>,
    /// Bytes of the whole.
    pub(crate) bytes: usize,
}

/// Parts of one fused parameter have different dtypes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{first} is {first_dtype} and {second} is {second_dtype}: the engine fuses them, so they must have one dtype"
)]
pub struct MixedDTypes {
    /// Name of the first part.
    pub first: String,
    /// Its dtype.
    pub first_dtype: DType,
    /// Name of a later part.
    pub second: String,
    /// Its dtype.
    pub second_dtype: DType,
}

impl WeightLayout {
    /// Lays out the manifest of `config`.
    pub(crate) fn new(
        config: &ModelConfig,
        manifest: &Manifest,
        device: &dyn Device,
    ) -> Result<Self, MixedDTypes> {
        let mut builder = Builder::new(manifest, device);
        let embedding = builder.matrix(&["model.embed_tokens.weight".into()])?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for index in 0..config.num_layers {
            layers.push(builder.layer(config, index)?);
        }
        let final_norm = builder.vector(&["model.norm.weight".into()])?;
        let head = if config.tie_word_embeddings {
            embedding
        } else {
            builder.matrix(&["lm_head.weight".into()])?
        };
        let places = builder.places.into_iter().map(|p| p.expect("the layout places the whole manifest"));
        Ok(Self {
            places: places.collect(),
            matrices: builder.matrices,
            vectors: builder.vectors,
            embedding,
            head,
            final_norm,
            layers,
            bytes: builder.bytes,
        })
    }

    pub(crate) fn matrix(&self, id: MatrixId) -> &PlacedMatrix {
        &self.matrices[id.0]
    }

    pub(crate) fn vector(&self, id: VectorId) -> &PlacedVector {
        &self.vectors[id.0]
    }
}

struct Builder<'a> {
    manifest: &'a Manifest,
    device: &'a dyn Device,
    index_of: HashMap<&'a str, usize>,
    places: Vec<Option<Place>>,
    matrices: Vec<PlacedMatrix>,
    vectors: Vec<PlacedVector>,
    bytes: usize,
}

impl<'a> Builder<'a> {
    fn new(manifest: &'a Manifest, device: &'a dyn Device) -> Self {
        let tensors = manifest.tensors();
        Self {
            index_of: tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect(),
            places: vec![None; tensors.len()],
            manifest,
            device,
            matrices: Vec::new(),
            vectors: Vec::new(),
            bytes: 0,
        }
    }

    fn layer(&mut self, config: &ModelConfig, index: usize) -> Result<LayerLayout, MixedDTypes> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let qkv = ["q", "k", "v"].map(|p| name(&format!("self_attn.{p}_proj.weight")));
        let qkv_bias = ["q", "k", "v"].map(|p| name(&format!("self_attn.{p}_proj.bias")));
        let gate_up = ["gate", "up"].map(|p| name(&format!("mlp.{p}_proj.weight")));
        let gate_up_bias = ["gate", "up"].map(|p| name(&format!("mlp.{p}_proj.bias")));
        let qk_norm = if config.qk_norm {
            let q = self.vector(&[name("self_attn.q_norm.weight")])?;
            Some((q, self.vector(&[name("self_attn.k_norm.weight")])?))
        } else {
            None
        };
        Ok(LayerLayout {
            qk_norm,
            input_norm: self.vector(&[name("input_layernorm.weight")])?,
            qkv: self.matrix(&qkv)?,
            qkv_bias: self.optional(config.qkv_bias, &qkv_bias)?,
            o: self.matrix(&[name("self_attn.o_proj.weight")])?,
            o_bias: self.optional(config.o_bias, &[name("self_attn.o_proj.bias")])?,
            post_norm: self.vector(&[name("post_attention_layernorm.weight")])?,
            gate_up: self.matrix(&gate_up)?,
            gate_up_bias: self.optional(config.mlp_bias, &gate_up_bias)?,
            down: self.matrix(&[name("mlp.down_proj.weight")])?,
            down_bias: self.optional(config.mlp_bias, &[name("mlp.down_proj.bias")])?,
        })
    }

    fn matrix(&mut self, parts: &[String]) -> Result<MatrixId, MixedDTypes> {
        let matrix = MatrixId(self.matrices.len());
        let (rows, dtype) = self.fuse(parts, |first_row| Place::Rows { matrix, first_row })?;
        let cols = self.manifest.tensors()[self.index_of[parts[0].as_str()]].shape[1];
        let shape = MatrixShape { rows, cols, dtype };
        let bytes = self.device.matrix_bytes(shape);
        let offset_bytes = self.allocate(bytes);
        self.matrices.push(PlacedMatrix { shape, offset_bytes, bytes });
        Ok(matrix)
    }

    fn vector(&mut self, parts: &[String]) -> Result<VectorId, MixedDTypes> {
        let vector = VectorId(self.vectors.len());
        let (len, dtype) = self.fuse(parts, |first_element| Place::Elements { vector, first_element })?;
        let offset_bytes = self.allocate(len * dtype.size());
        self.vectors.push(PlacedVector { len, dtype, offset_bytes });
        Ok(vector)
    }

    fn optional(&mut self, present: bool, parts: &[String]) -> Result<Option<VectorId>, MixedDTypes> {
        if present { self.vector(parts).map(Some) } else { Ok(None) }
    }

    /// Gives each part its place, one after the other; returns the length along the first dimension.
    fn fuse(
        &mut self,
        parts: &[String],
        place: impl Fn(usize) -> Place,
    ) -> Result<(usize, DType), MixedDTypes> {
        let first = &self.manifest.tensors()[self.index_of[parts[0].as_str()]];
        let mut length = 0;
        for part in parts {
            let index = self.index_of[part.as_str()];
            let tensor = &self.manifest.tensors()[index];
            if tensor.dtype != first.dtype {
                return Err(MixedDTypes {
                    first: first.name.clone(),
                    first_dtype: first.dtype,
                    second: tensor.name.clone(),
                    second_dtype: tensor.dtype,
                });
            }
            self.places[index] = Some(place(length));
            length += tensor.shape[0];
        }
        Ok((length, first.dtype))
    }

    fn allocate(&mut self, bytes: usize) -> usize {
        let offset = self.bytes;
        self.bytes += bytes.next_multiple_of(ALIGNMENT);
        offset
    }
}
