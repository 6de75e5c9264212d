//! A PEFT LoRA adapter as low-rank changes of a model's weights.

mod config;
mod error;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use self::config::LoraConfig;
pub use self::error::{LoraError, LoraMismatch, LoraShapes};
use super::{Delta, MAX_RANK};
use crate::weights::convert::convert;
use crate::weights::{DType, NameMap, SafetensorsFile, TensorSpec, WeightSource};

/// Most tensors of an adapter.
const MAX_LORA_TENSORS: usize = 65_536;

/// A LoRA adapter in memory: for each weight that it changes a pair of thin matrices.
///
/// Pairs are found by the names that PEFT gives them, `<module>.lora_A.weight` `[rank, in]` and
/// `<module>.lora_B.weight` `[out, rank]`, also with `.default` before `.weight`; they change
/// `<module>.weight`. Ranks may differ from pair to pair. Any other tensor (of DoRA, an embedding's LoRA, a
/// saved copy of a whole module) is refused rather than left out, unless the name map ignores it.
#[derive(Debug, Clone)]
pub struct LoraAdapter {
    /// By name of the weight, each once.
    pairs: BTreeMap<String, Pair>,
}

#[derive(Clone)]
struct Pair {
    a: Vec<u8>,
    b: Vec<u8>,
    rank: usize,
    dtype: DType,
    scale: f32,
}

impl fmt::Debug for Pair {
    /// The lengths, not the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.delta().fmt(f)
    }
}

impl Pair {
    fn delta(&self) -> Delta<'_> {
        let Pair { a, b, rank, dtype, scale } = self;
        Delta::LowRank { a, b, rank: *rank, dtype: *dtype, scale: *scale }
    }
}

impl LoraAdapter {
    /// Reads an adapter whose pairs all have one scale, `lora_alpha / rank` as a rule.
    ///
    /// [`NameMap::wrappers`] takes PEFT's own prefix off. The map strips names as they were sent, and renames
    /// weights (`….q_proj.weight`); it may ignore either a weight or a tensor of the adapter.
    /// The whole adapter is in memory then, in the dtypes it was sent in.
    ///
    /// # Errors
    /// A [`LoraError`]: the source fails, or its tensors are no adapter.
    pub fn read(mut source: impl WeightSource, names: &NameMap, scale: f32) -> Result<Self, LoraError> {
        read_pairs(&mut source, names, &|_, _| Ok(scale))
    }

    /// Reads `adapter_config.json` and `adapter_model.safetensors` of a directory, as PEFT writes them, with
    /// [`NameMap::wrappers`].
    ///
    /// The scale is `lora_alpha / rank`, or `lora_alpha / sqrt(rank)` with `use_rslora`; `rank_pattern` is
    /// understood. An adapter that is more than its pairs, or whose pairs mean something else, is refused:
    /// DoRA, biases, `fan_in_fan_out`, `alpha_pattern`, `modules_to_save`, an initialisation that changes the
    /// base weights.
    ///
    /// # Errors
    /// A [`LoraError`]: a file can't be read, the configuration asks for what isn't there, or the tensors are
    /// no adapter.
    pub fn from_dir(directory: impl AsRef<Path>) -> Result<Self, LoraError> {
        let directory = directory.as_ref();
        let config = LoraConfig::read(&directory.join("adapter_config.json"))?;
        let mut source = SafetensorsFile::at(directory.join("adapter_model.safetensors"));
        read_pairs(&mut source, &NameMap::wrappers(), &|name, rank| config.scale(name, rank))
    }

    /// Names of the weights that the adapter changes, in order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.pairs.keys().map(String::as_str)
    }

    /// The changes, each with the name of its weight, in order of the names.
    pub fn deltas(&self) -> impl Iterator<Item = (&str, Delta<'_>)> {
        self.pairs.iter().map(|(name, pair)| (name.as_str(), pair.delta()))
    }
}

/// Where the two tensors of a pair are in the source's index.
#[derive(Default)]
struct Places {
    a: Option<usize>,
    b: Option<usize>,
}

fn read_pairs(
    source: &mut dyn WeightSource,
    names: &NameMap,
    scale: &dyn Fn(&str, usize) -> Result<f32, LoraError>,
) -> Result<LoraAdapter, LoraError> {
    let specs = source.index()?;
    if specs.len() > MAX_LORA_TENSORS {
        return Err(LoraError::TooManyTensors { tensors: specs.len(), limit: MAX_LORA_TENSORS });
    }
    let mut faults = LoraMismatch::default();
    let unsupported = source.unsupported().iter();
    faults.unsupported_dtype.extend(unsupported.filter(|tensor| !ignored(names, &tensor.name)).cloned());
    let places = find_pairs(&specs, names, &mut faults);
    let found = check_pairs(&places, &specs, &mut faults);
    if !faults.is_empty() {
        faults.sort();
        return Err(LoraError::Mismatch(Box::new(faults)));
    }
    let mut scales = Vec::with_capacity(found.len());
    for &(name, [a, _]) in &found {
        let scale = scale(name, specs[a].shape[0])?;
        if !scale.is_finite() {
            return Err(LoraError::Scale { name: name.to_owned(), scale });
        }
        scales.push(scale);
    }
    let mut tensors = read_tensors(source, &specs, found.iter().flat_map(|(_, pair)| *pair).collect())?;
    let mut pairs = BTreeMap::new();
    for ((name, [a, b]), scale) in found.into_iter().zip(scales) {
        let dtype = if specs[a].dtype == specs[b].dtype { specs[a].dtype } else { DType::F32 };
        let mut bytes =
            |tensor: usize| in_dtype(std::mem::take(&mut tensors[tensor]), specs[tensor].dtype, dtype);
        let pair = Pair { a: bytes(a), b: bytes(b), rank: specs[a].shape[0], dtype, scale };
        pairs.insert(name.to_owned(), pair);
    }
    Ok(LoraAdapter { pairs })
}

/// Sorts the tensors into pairs by the weight they change.
fn find_pairs(specs: &[TensorSpec], names: &NameMap, faults: &mut LoraMismatch) -> BTreeMap<String, Places> {
    let mut pairs: BTreeMap<String, Places> = BTreeMap::new();
    for (i, spec) in specs.iter().enumerate() {
        if ignored(names, &spec.name) {
            continue;
        }
        let Some((weight, is_a)) = weight_of(&names.strip(&spec.name)) else {
            faults.unknown.push(spec.name.clone());
            continue;
        };
        let places = pairs.entry(names.renamed(weight.into()).into_owned()).or_default();
        let place = if is_a { &mut places.a } else { &mut places.b };
        if place.replace(i).is_some() {
            faults.duplicate.push(spec.name.clone());
        }
    }
    pairs
}

/// Whether a tensor is to be dropped: by its own name, or by that of the weight it would change.
fn ignored(names: &NameMap, sent: &str) -> bool {
    let stripped = names.strip(sent);
    let weight = weight_of(&stripped);
    names.ignores(sent) || names.ignores(&stripped) || weight.is_some_and(|(name, _)| names.ignores(&name))
}

/// The weight that a tensor of this stripped name changes, and whether it is the pair's `a`.
fn weight_of(stripped: &str) -> Option<(String, bool)> {
    const ENDS: [(&str, bool); 4] = [
        (".lora_A.weight", true),
        (".lora_A.default.weight", true),
        (".lora_B.weight", false),
        (".lora_B.default.weight", false),
    ];
    let (module, is_a) = ENDS.iter().find_map(|&(end, is_a)| Some((stripped.strip_suffix(end)?, is_a)))?;
    (!module.is_empty()).then(|| (format!("{module}.weight"), is_a))
}

/// The complete pairs of fitting shapes, `a` first.
fn check_pairs<'a>(
    pairs: &'a BTreeMap<String, Places>,
    specs: &[TensorSpec],
    faults: &mut LoraMismatch,
) -> Vec<(&'a str, [usize; 2])> {
    let mut found = Vec::new();
    for (name, places) in pairs {
        let (a, b) = match (places.a, places.b) {
            (Some(a), Some(b)) => (a, b),
            (Some(_), None) => {
                faults.without_b.push(name.clone());
                continue;
            }
            _ => {
                faults.without_a.push(name.clone());
                continue;
            }
        };
        match (specs[a].shape.as_slice(), specs[b].shape.as_slice()) {
            (&[rank, _], &[_, same]) if rank == same && (1..=MAX_RANK).contains(&rank) => {
                found.push((name.as_str(), [a, b]));
            }
            (a, b) => {
                faults.wrong_shapes.push(LoraShapes { name: name.clone(), a: a.to_vec(), b: b.to_vec() });
            }
        }
    }
    found
}

/// Reads the tensors at these positions, in the source's order; the others stay empty.
fn read_tensors(
    source: &mut dyn WeightSource,
    specs: &[TensorSpec],
    mut wanted: Vec<usize>,
) -> Result<Vec<Vec<u8>>, LoraError> {
    wanted.sort_unstable();
    source.plan(&wanted)?;
    let mut tensors = vec![Vec::new(); specs.len()];
    for i in wanted {
        let expected_bytes = specs[i].checked_bytes();
        let mut received_bytes = 0usize;
        // Nothing is reserved for what a shape only promises, and nothing kept beyond that.
        let bytes: &mut Vec<u8> = &mut tensors[i];
        source.read(i, &mut |piece| {
            received_bytes = received_bytes.saturating_add(piece.len());
            if expected_bytes.is_some_and(|expected| received_bytes <= expected) {
                bytes.extend_from_slice(piece);
            }
        })?;
        if expected_bytes != Some(received_bytes) {
            let name = specs[i].name.clone();
            return Err(LoraError::WrongLength { name, expected_bytes, received_bytes });
        }
    }
    source.finish()?;
    Ok(tensors)
}

/// The elements in another dtype: the pairs of which are in two are widened, which is exact.
fn in_dtype(bytes: Vec<u8>, from: DType, to: DType) -> Vec<u8> {
    if from == to {
        return bytes;
    }
    let mut out = vec![0; bytes.len() / from.size() * to.size()];
    convert(from, &bytes, to, &mut out);
    out
}
