//! An engine with weights loaded, ways to feed it new ones, and what must be true of it then.

use dormouse::{
    Awake, Bucket, BucketEntry, BucketWriter, DType, Discarded, Engine, Kept, Load, PushError,
    SafetensorsBytes, TensorSet, TensorSpec, Update, WeightSource, WeightVersion, WeightsDigest,
    WeightsLoaded,
};

use crate::common::{Tensor, Weights, bits, fresh, tiny_builder, weights_dtype};
use crate::cycle::request;

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const Q: &str = "model.layers.0.self_attn.q_proj.weight";
pub(crate) const K: &str = "model.layers.1.self_attn.k_proj.weight";
pub(crate) const GATE: &str = "model.layers.0.mlp.gate_proj.weight";

/// An untied engine with these weights.
pub(crate) fn loaded(weights: &Weights) -> Engine<WeightsLoaded> {
    let builder = tiny_builder(false, weights_dtype(weights));
    builder.build_asleep().unwrap().load_weights(weights.source()).unwrap()
}

pub(crate) fn spec(name: &str, tensor: &Tensor) -> TensorSpec {
    let dtype = DType::try_from(tensor.dtype).unwrap();
    TensorSpec { name: name.to_owned(), dtype, shape: tensor.shape.clone() }
}

pub(crate) fn digest(weights: &Weights) -> WeightsDigest {
    WeightsDigest::of(&mut weights.source()).unwrap()
}

pub(crate) fn get<'a>(weights: &'a Weights, name: &str) -> &'a Tensor {
    &weights.0.iter().find(|(other, _)| other == name).unwrap().1
}

pub(crate) fn get_mut<'a>(weights: &'a mut Weights, name: &str) -> &'a mut Tensor {
    &mut weights.0.iter_mut().find(|(other, _)| other == name).unwrap().1
}

/// `base` with the tensors of these names from `other`.
pub(crate) fn mix(base: &Weights, other: &Weights, names: &[&str]) -> Weights {
    let mut mixed = base.clone();
    names.iter().for_each(|name| *get_mut(&mut mixed, name) = get(other, name).clone());
    mixed
}

/// These tensors of a set, as a source.
pub(crate) fn only<'a>(weights: &'a Weights, names: &[&str]) -> TensorSet<&'a Tensor> {
    names.iter().map(|name| (*name, get(weights, name))).collect()
}

/// All that an engine says about weights that are whole.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Known {
    version: WeightVersion,
    tensors: Vec<Vec<u8>>,
    digests: Vec<dormouse::TensorDigest>,
}

pub(crate) fn known(loaded: &Engine<WeightsLoaded>) -> Known {
    let version = loaded.version().expect("the weights are whole");
    let verified = loaded.verify().expect("the memory holds what came in");
    let specs = loaded.expected_weights().tensors();
    assert_eq!((verified.version.clone(), verified.tensors), (version.clone(), specs.len()));
    let tensors = specs.iter().map(|spec| loaded.tensor(&spec.name).unwrap().data).collect();
    let digests = loaded.tensor_digests().unwrap().into_iter().map(|(_, digest)| digest).collect();
    Known { version, tensors, digests }
}

/// The engine holds exactly these weights.
#[track_caller]
pub(crate) fn assert_holds(loaded: &Engine<WeightsLoaded>, weights: &Weights) {
    let known = known(loaded);
    assert_eq!(known.version.digest, digest(weights));
    assert_eq!(known.tensors.len(), weights.0.len());
    for (spec, data) in loaded.expected_weights().tensors().iter().zip(&known.tensors) {
        assert!(*data == get(weights, &spec.name).data, "{}", spec.name);
    }
}

/// What it says is what a fresh engine with these weights says.
#[track_caller]
pub(crate) fn assert_wakes_like_fresh(loaded: Engine<WeightsLoaded>, weights: &Weights) {
    drop(wakes_like_fresh(loaded, weights));
}

#[track_caller]
pub(crate) fn wakes_like_fresh(loaded: Engine<WeightsLoaded>, weights: &Weights) -> Engine<Awake> {
    let engine = loaded.wake_up().expect("whole weights and memory");
    let request = request(1);
    for _ in 0..2 {
        let output = engine.generate(std::slice::from_ref(&request)).unwrap().remove(0);
        assert_eq!(bits(&output), bits(&fresh(weights, false, &request)));
    }
    engine
}

/// What loads and updates have in common.
pub(crate) trait Feed {
    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<(), PushError>;
    fn piece(&mut self, tensor: &TensorSpec, offset: usize, bytes: &[u8]) -> Result<(), PushError>;
    fn bucket(&mut self, bucket: &Bucket<'_>) -> Result<(), PushError>;
    fn all(&mut self, source: &mut dyn WeightSource) -> Result<(), PushError>;
}

macro_rules! feed {
    ($($target:ty)*) => {$(
        impl Feed for $target {
            fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<(), PushError> {
                self.push(name, &tensor)
            }
            fn piece(&mut self, tensor: &TensorSpec, offset: usize, bytes: &[u8]) -> Result<(), PushError> {
                self.push_piece(tensor, offset, bytes)
            }
            fn bucket(&mut self, bucket: &Bucket<'_>) -> Result<(), PushError> {
                self.push_bucket(bucket)
            }
            fn all(&mut self, source: &mut dyn WeightSource) -> Result<(), PushError> {
                self.push_all(source)
            }
        }
    )*};
}
feed! { Update<'_> Load<Kept> Load<Discarded> }

/// An order that depends on `seed`: the given one for 0, the reverse for 1.
pub(crate) fn ordered(weights: &Weights, seed: u64) -> Vec<&(String, Tensor)> {
    let mut tensors: Vec<_> = weights.0.iter().enumerate().collect();
    tensors.sort_by_key(|(i, _)| match seed {
        0 => *i as u64,
        1 => u64::MAX - *i as u64,
        _ => (*i as u64 + 1).wrapping_mul(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).rotate_left(29),
    });
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Pushes a complete set in one of [`WAYS`] ways.
pub(crate) fn feed(way: usize, to: &mut dyn Feed, weights: &Weights) -> Result<(), PushError> {
    let seed = (way % 3) as u64;
    match way {
        // Tensor by tensor.
        0..3 => ordered(weights, seed).into_iter().try_for_each(|(name, tensor)| to.tensor(name, tensor)),
        // Buckets of 1, 2, 3, 7 and all tensors, in three orders: q last, parts of two layers between each
        // other.
        3..18 => {
            let size = [1, 2, 3, 7, usize::MAX][(way - 3) / 3];
            ordered(weights, seed).chunks(size.min(weights.0.len())).try_for_each(|tensors| {
                let mut data = Vec::new();
                let entries = tensors.iter().map(|(name, tensor)| {
                    let at = data.len();
                    data.extend_from_slice(&tensor.data);
                    BucketEntry { tensor: spec(name, tensor), offset: 0, range: at..data.len() }
                });
                let entries = entries.collect();
                to.bucket(&Bucket::new(entries, &data).expect("whole tensors"))
            })
        }
        // Encoded buckets of so many bytes, in three orders.
        18..27 => {
            let bytes = [52, 1000, 9001][(way - 18) / 3];
            let mut buckets = Vec::new();
            let tensors = ordered(weights, seed).into_iter().map(|(name, tensor)| (name.clone(), tensor));
            let mut each = |bucket| {
                buckets.push(bucket);
                Ok(())
            };
            BucketWriter::new(bytes).write(&mut TensorSet::new(tensors), &mut each).expect("in memory");
            match seed {
                0 => {}
                1 => buckets.reverse(),
                _ => {
                    let middle = buckets.len() / 2;
                    buckets.rotate_left(middle);
                }
            }
            buckets.iter().try_for_each(|bytes| to.bucket(&Bucket::parse(bytes).expect("just written")))
        }
        // Sources: from memory, a file's bytes, a file, a checkpoint, in parts.
        27 => to.all(&mut weights.source()),
        28 => {
            let directory = tempfile::tempdir().unwrap();
            weights.save(&directory.path().join("model.safetensors"));
            let bytes = std::fs::read(directory.path().join("model.safetensors")).unwrap();
            to.all(&mut SafetensorsBytes::new(&bytes))
        }
        29 => {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("model.safetensors");
            weights.save(&path);
            to.all(&mut dormouse::SafetensorsFile::at(&path))
        }
        30 => {
            let directory = tempfile::tempdir().unwrap();
            weights.save(&directory.path().join("model.safetensors"));
            to.all(&mut dormouse::Checkpoint::at(directory.path()))
        }
        31 => weights.0.chunks(4).rev().try_for_each(|part| to.all(&mut Weights(part.to_vec()).source())),
        // Pieces of a few bytes, all tensors in turn, the last piece of each first.
        _ => {
            let step = [7, 256, 1001][(way - 32) % 3];
            let pieces = weights.0.iter().map(|(_, tensor)| tensor.data.len().div_ceil(step)).max().unwrap();
            (0..pieces).rev().try_for_each(|piece| {
                weights.0.iter().try_for_each(|(name, tensor)| {
                    let begin = tensor.data.len().min(piece * step);
                    let end = tensor.data.len().min(begin + step);
                    match begin < end {
                        true => to.piece(&spec(name, tensor), begin, &tensor.data[begin..end]),
                        false => Ok(()),
                    }
                })
            })
        }
    }
}

/// Ways of [`feed`].
pub(crate) const WAYS: usize = 35;
