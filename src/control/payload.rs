//! Weights that were sent, brought to an engine before a deadline.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::ControlError;
use super::operation::Payload;
use super::owner::Time;
use crate::engine::{
    Engine, Failed, Load, Retention, Sleeping, Update, UpdateError, UpdateReport, WeightsLoaded,
};
use crate::weights::{
    Bucket, LoadOptions, SourceError, TensorReader, TensorSpec, UnsupportedTensor, UpdateOptions,
    WeightSource,
};

const DURING: &str = "while weights came in";

/// Loads a complete set.
pub(super) fn load<W: Retention>(
    engine: Engine<Sleeping<W>>,
    weights: Payload,
    options: LoadOptions,
    time: Time,
) -> Result<Engine<WeightsLoaded>, Failed<Sleeping<W>, ControlError>> {
    if let Payload::Source(source) = weights {
        let timed = Timed::new(source, time);
        let passed = timed.passed.clone();
        return engine
            .load_weights_with(timed, options)
            .map_err(|failed| failed.map(|error| passed.or(time, error)));
    }
    let mut load = engine.begin_load(options).map_err(|failed| failed.map(ControlError::from))?;
    if let Err(error) = bring(&mut load, weights, time) {
        return Err(Failed::new(load.abandon(), error));
    }
    load.commit().map_err(|failed| failed.map(ControlError::from))
}

/// Updates loaded weights in one go.
pub(super) fn update(
    engine: &mut Engine<WeightsLoaded>,
    weights: Payload,
    mut options: UpdateOptions,
    time: Time,
) -> Result<UpdateReport, ControlError> {
    if let Payload::Source(source) = weights {
        let timed = Timed::new(source, time);
        let passed = timed.passed.clone();
        return engine.update_with(timed, options).map_err(|error| passed.or(time, error));
    }
    if let (Payload::Adapter(adapter), None) = (&weights, &options.partial) {
        options = options.partial(adapter.tensor_names().map(str::to_owned).collect::<Vec<_>>());
    }
    let mut update = engine.begin_update(options).map_err(UpdateError::Begin)?;
    bring(&mut update, weights, time)?;
    Ok(update.commit().map_err(UpdateError::Commit)?)
}

/// An open transaction that weights are pushed to.
pub(super) trait Target {
    fn push_source(&mut self, source: Timed) -> Result<(), ControlError>;
    fn push_bucket(&mut self, bucket: &Bucket<'_>) -> Result<(), ControlError>;
    #[cfg(feature = "cuda")]
    fn push_gpu_bucket(&mut self, bucket: &crate::GpuBucket) -> Result<(), ControlError>;
    fn push_adapter(&mut self, adapter: &crate::LoraAdapter) -> Result<(), ControlError>;
}

impl<W: Retention> Target for Load<W> {
    fn push_source(&mut self, source: Timed) -> Result<(), ControlError> {
        Ok(self.push_all(source)?)
    }

    fn push_bucket(&mut self, bucket: &Bucket<'_>) -> Result<(), ControlError> {
        Ok(Load::push_bucket(self, bucket)?)
    }

    #[cfg(feature = "cuda")]
    fn push_gpu_bucket(&mut self, bucket: &crate::GpuBucket) -> Result<(), ControlError> {
        Ok(Load::push_gpu_bucket(self, bucket)?)
    }

    fn push_adapter(&mut self, _: &crate::LoraAdapter) -> Result<(), ControlError> {
        Err(incomplete())
    }
}

impl Target for Update<'_> {
    fn push_source(&mut self, source: Timed) -> Result<(), ControlError> {
        Ok(self.push_all(source)?)
    }

    fn push_bucket(&mut self, bucket: &Bucket<'_>) -> Result<(), ControlError> {
        Ok(Update::push_bucket(self, bucket)?)
    }

    #[cfg(feature = "cuda")]
    fn push_gpu_bucket(&mut self, bucket: &crate::GpuBucket) -> Result<(), ControlError> {
        Ok(Update::push_gpu_bucket(self, bucket)?)
    }

    fn push_adapter(&mut self, adapter: &crate::LoraAdapter) -> Result<(), ControlError> {
        Ok(Update::push_adapter(self, adapter)?)
    }
}

/// What an adapter is where all weights are wanted.
pub(super) fn incomplete() -> ControlError {
    let requirement = "must be complete: an adapter only changes weights that are there";
    ControlError::InvalidArgument { argument: "weights", requirement }
}

/// Pushes what was sent.
pub(super) fn bring(target: &mut impl Target, weights: Payload, time: Time) -> Result<(), ControlError> {
    match weights {
        Payload::Source(source) => {
            let timed = Timed::new(source, time);
            let passed = timed.passed.clone();
            target.push_source(timed).map_err(|error| passed.or(time, error))
        }
        Payload::Bucket(bytes) => target.push_bucket(&Bucket::parse(&bytes)?),
        #[cfg(feature = "cuda")]
        Payload::GpuBucket(bucket) => target.push_gpu_bucket(&bucket),
        Payload::Adapter(adapter) => target.push_adapter(&adapter),
    }
}

/// A source that stops when its time is over.
pub(super) struct Timed {
    source: Box<dyn WeightSource + Send>,
    time: Time,
    passed: Passed,
}

/// Whether a source was stopped.
#[derive(Clone)]
struct Passed(Arc<AtomicBool>);

#[derive(Debug, thiserror::Error)]
#[error("the deadline passed")]
struct DeadlinePassed;

impl Passed {
    /// The deadline, if that is why an operation failed.
    fn or(&self, time: Time, error: impl Into<ControlError>) -> ControlError {
        if self.0.load(Ordering::Relaxed) { time.passed(DURING) } else { error.into() }
    }

    fn check(&self, time: Time) -> Result<(), SourceError> {
        if !time.is_over() {
            return Ok(());
        }
        self.0.store(true, Ordering::Relaxed);
        Err(SourceError::Custom(Box::new(DeadlinePassed)))
    }
}

impl Timed {
    fn new(source: Box<dyn WeightSource + Send>, time: Time) -> Self {
        Self { source, time, passed: Passed(Arc::default()) }
    }
}

impl WeightSource for Timed {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        self.passed.check(self.time)?;
        self.source.index()
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        self.source.unsupported()
    }

    fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
        self.passed.check(self.time)?;
        self.source.plan(tensors)
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        self.passed.check(self.time)?;
        self.source.read(tensor, sink)?;
        self.passed.check(self.time)
    }

    fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
        self.passed.check(self.time)?;
        let (time, passed) = (self.time, self.passed.clone());
        let reader = self.source.reader(tensor)?;
        Ok(reader.map(|reader| Box::new(TimedReader { reader, time, passed }) as Box<dyn TensorReader>))
    }

    #[cfg(feature = "cuda")]
    fn gpu_memory(&mut self, tensor: usize) -> Result<Option<crate::GpuMemory>, SourceError> {
        self.passed.check(self.time)?;
        self.source.gpu_memory(tensor)
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        self.source.finish()
    }
}

struct TimedReader<'a> {
    reader: Box<dyn TensorReader + 'a>,
    time: Time,
    passed: Passed,
}

impl TensorReader for TimedReader<'_> {
    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), SourceError> {
        self.passed.check(self.time)?;
        self.reader.read_at(offset, out)
    }
}
