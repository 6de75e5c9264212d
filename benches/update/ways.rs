//! The ways in.

use dormouse::{
    Bucket, BucketWriter, Checkpoint, DType, Delta, Engine, Failed, LoadOptions, SleepOptions, SourceError,
    SparseOp, TensorSpec, Update, UpdateOptions, WeightSource, WeightVersion, WeightsLoaded,
};

use super::common::{Outcome, Tensor, timed};
use super::model::{Model, set};
use super::process::Trainer;
use super::times::{Time, Times};

/// An update from tensors in memory.
pub(crate) const MEMORY: &str = "tensors in memory";
/// The digest alone.
pub(crate) const DIGEST: &str = "the digest alone, in cache";

/// What buckets hold, MiB.
const BUCKET_MIB: [usize; 3] = [4, 64, 256];
/// Of the low-rank change.
const RANK: usize = 16;
/// Of the sparse change: one of so many elements.
const SPARSE: usize = 100;

type Confirm<'a> = Box<dyn Fn(&WeightVersion) -> Outcome + 'a>;

/// One way for new weights to become current.
pub(crate) struct Way<'a> {
    name: String,
    options: UpdateOptions,
    push: Box<dyn Fn(&mut Update<'_>) -> Outcome + 'a>,
    /// What a trainer that waits for it is told.
    confirm: Option<Confirm<'a>>,
}

impl<'a> Way<'a> {
    fn new(
        name: impl Into<String>,
        options: impl Into<UpdateOptions>,
        push: impl Fn(&mut Update<'_>) -> Outcome + 'a,
    ) -> Self {
        Self { name: name.into(), options: options.into(), push: Box::new(push), confirm: None }
    }
}

/// All ways that bring weights into an engine that has some.
pub(crate) fn all<'a>(model: &'a Model, trainer: &'a Trainer) -> Outcome<Vec<Way<'a>>> {
    let staged = LoadOptions::default();
    let push_set = |update: &mut Update<'_>| Ok(update.push_all(model.set())?);
    let mut ways = vec![
        Way::new(MEMORY, staged.clone(), push_set),
        Way::new("tensors in memory, in place", UpdateOptions::default().in_place(), push_set),
        Way::new("tensors in memory, must be finite", staged.clone().require_finite(), push_set),
        Way::new("pushed tensor by tensor", staged.clone(), |update| push_each(update, &model.tensors)),
        Way::new("files in the page cache", staged.clone(), |update| {
            Ok(update.push_all(Checkpoint::at(&model.directory))?)
        }),
    ];
    for mib in BUCKET_MIB {
        let buckets = buckets(model, mib << 20)?;
        ways.push(Way::new(format!("buckets of {mib} MiB"), staged.clone(), move |update| {
            buckets.iter().try_for_each(|bucket| Ok(update.push_bucket(&Bucket::parse(bucket)?)?))
        }));
    }
    if model.tensors.iter().any(|tensor| tensor.spec.dtype != DType::F32) {
        let wide: Vec<Tensor> = model.tensors.iter().map(widen).collect();
        let options = staged.convert_dtypes();
        ways.push(Way::new(
            "f32 in memory, rounded",
            options,
            move |update| Ok(update.push_all(set(&wide))?),
        ));
    }
    ways.push(Way {
        confirm: Some(Box::new(|version| trainer.confirm(version))),
        ..Way::new("another process, shared memory", LoadOptions::default(), |update| trainer.push(update))
    });
    ways.extend(partial(model));
    Ok(ways)
}

/// Ways that leave some tensors as they are.
fn partial(model: &Model) -> Vec<Way<'_>> {
    let of_layer = |tensor: &&Tensor| tensor.spec.name.starts_with("model.layers.0.");
    let layer = move || model.tensors.iter().filter(of_layer);
    let names = layer().map(|tensor| &tensor.spec.name);
    let one_layer = UpdateOptions::default().partial(names);
    let linear = UpdateOptions::default().partial(model.linear().map(|tensor| &tensor.spec.name));
    let sparse: Vec<_> = model.linear().map(sparse).collect();
    vec![
        Way::new("one layer", one_layer.clone(), move |update| push_each(update, layer())),
        Way::new("one layer, in place", one_layer.in_place(), move |update| push_each(update, layer())),
        Way::new(format!("rank {RANK} on all linear layers"), linear.clone(), |update| {
            Ok(model
                .linear()
                .try_for_each(|tensor| update.push_delta(&tensor.spec.name, &low_rank(tensor)))?)
        }),
        Way::new("1 % of all linear layers' elements", linear, move |update| {
            Ok(model.linear().zip(&sparse).try_for_each(|(tensor, (indices, values))| {
                let (dtype, op) = (tensor.spec.dtype, SparseOp::Set);
                update.push_delta(&tensor.spec.name, &Delta::Sparse { indices, values, dtype, op })
            })?)
        }),
    ]
}

fn push_each<'t>(update: &mut Update<'_>, tensors: impl IntoIterator<Item = &'t Tensor>) -> Outcome {
    for tensor in tensors {
        update.push(&tensor.spec.name, &tensor)?;
    }
    Ok(())
}

fn buckets(model: &Model, capacity_bytes: usize) -> Outcome<Vec<Vec<u8>>> {
    let mut buckets = Vec::new();
    BucketWriter::new(capacity_bytes).write(&mut model.set(), &mut |bucket| {
        buckets.push(bucket);
        Ok(())
    })?;
    Ok(buckets)
}

/// The same tensor in f32.
fn widen(tensor: &Tensor) -> Tensor {
    let elements = tensor.data.chunks_exact(tensor.spec.dtype.size());
    let value = |bytes: &[u8]| match (tensor.spec.dtype, bytes) {
        (DType::Bf16, &[low, high]) => half::bf16::from_le_bytes([low, high]).to_f32(),
        (_, &[low, high]) => half::f16::from_le_bytes([low, high]).to_f32(),
        (_, bytes) => f32::from_le_bytes(bytes.try_into().unwrap_or_default()),
    };
    let data = elements.flat_map(|bytes| value(bytes).to_le_bytes()).collect();
    Tensor { spec: TensorSpec { dtype: DType::F32, ..tensor.spec.clone() }, data }
}

/// A change whose factors are the tensor's own first bytes: any numbers will do.
fn low_rank(tensor: &Tensor) -> Delta<'_> {
    let (dtype, rows, cols) = (tensor.spec.dtype, tensor.spec.shape[0], tensor.spec.shape[1]);
    let rank = RANK.min(rows).min(cols);
    let factor = |elements: usize| &tensor.data[..elements * dtype.size()];
    Delta::LowRank { a: factor(rank * cols), b: factor(rank * rows), rank, dtype, scale: 1e-3 }
}

/// Positions and new values: the tensor's own first ones.
fn sparse(tensor: &Tensor) -> (Vec<u64>, Vec<u8>) {
    let size = tensor.spec.dtype.size();
    let indices: Vec<u64> = (0..(tensor.data.len() / size) as u64).step_by(SPARSE).collect();
    let values = tensor.data[..indices.len() * size].to_vec();
    (indices, values)
}

/// Takes every way once.
pub(crate) fn round(
    model: &Model,
    ways: &[Way<'_>],
    mut engine: Engine<WeightsLoaded>,
    threads: usize,
    times: &mut Times,
) -> Outcome<Engine<WeightsLoaded>> {
    for way in ways {
        let (update, begin) = timed(|| engine.begin_update(way.options.clone()));
        let mut update = update?;
        let (pushed, receiving) = timed(|| (way.push)(&mut update));
        pushed?;
        let (report, commit) = timed(|| update.commit());
        let total = begin + receiving + commit;
        let time = Time { total, begin: Some(begin), commit: Some(commit) };
        let report = report?;
        times.note(&way.name, threads, report.received_bytes, time);
        way.confirm.as_ref().map_or(Ok(()), |confirm| confirm(&report.version))?;
    }
    let (digest, time) = timed(|| engine.digest_of(InCache::of(model), LoadOptions::default()));
    digest?;
    times.note(DIGEST, threads, model.bytes, time);
    let (digest, time) = timed(|| engine.digest_of(model.set(), LoadOptions::default()));
    digest?;
    times.note("digest_of tensors in memory", threads, model.bytes, time);
    let (verified, time) = timed(|| engine.verify());
    verified?;
    times.note("verify", threads, model.bytes, time);

    let awake = engine.wake_up().map_err(|Failed { error, .. }| error)?;
    let asleep = awake.sleep_discarding(SleepOptions::default()).map_err(|Failed { error, .. }| error)?;
    let (loaded, total) = timed(|| asleep.load_weights(model.set()));
    let loaded = loaded.map_err(|Failed { error, .. }| error)?;
    let time = Time { total, begin: None, commit: Some(loaded.report().commit) };
    times.note("load from memory, weights discarded", threads, model.bytes, time);
    Ok(loaded)
}

/// As many bytes as the model has, all of them from one small block.
struct InCache<'a> {
    model: &'a Model,
    block: Vec<u8>,
}

impl<'a> InCache<'a> {
    /// Half of a usual second-level cache.
    const BYTES: usize = 1 << 20;

    fn of(model: &'a Model) -> Self {
        Self { model, block: (0..Self::BYTES).map(|i| (i % 61) as u8).collect() }
    }
}

impl WeightSource for InCache<'_> {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.model.set().index()
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let Tensor { spec, data } = &self.model.tensors[tensor];
        // Whole rows, sixteen of them at least, so that nothing has to be put together.
        let rows = 16 * spec.shape[1..].iter().product::<usize>() * spec.dtype.size();
        let piece_bytes = (Self::BYTES / rows * rows).clamp(1, Self::BYTES);
        for piece in data.chunks(piece_bytes) {
            sink(&self.block[..piece.len()]);
        }
        Ok(())
    }
}
