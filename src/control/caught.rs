//! The caller's code, held so that its panics are errors: the controller outlives them, the drop included.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use super::operation::{Operation, Payload};
use crate::weights::{SourceError, TensorReader, TensorSpec, UnsupportedTensor, WeightSource};

#[derive(Debug, thiserror::Error)]
#[error("the source panicked")]
struct SourcePanicked;

fn panicked() -> SourceError {
    SourceError::Custom(Box::new(SourcePanicked))
}

fn caught<T>(call: impl FnOnce() -> Result<T, SourceError>) -> Result<T, SourceError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(panicked()))
}

/// Calls what must not stop us, whatever it does.
pub(super) fn quietly(call: impl FnOnce()) {
    let Err(payload) = catch_unwind(AssertUnwindSafe(call)) else { return };
    // It may panic when it is dropped, and so may a subscriber when it is told.
    std::mem::forget(payload);
    if let Err(payload) = catch_unwind(|| tracing::error!("the caller's code panicked")) {
        std::mem::forget(payload);
    }
}

impl Operation {
    /// Holds the caller's source behind a [`CaughtSource`], from the receipt on.
    pub(super) fn caught(self) -> Self {
        match self {
            Self::LoadWeights { weights, options } => {
                Self::LoadWeights { weights: weights.caught(), options }
            }
            Self::UpdateWeights { weights, options } => {
                Self::UpdateWeights { weights: weights.caught(), options }
            }
            Self::Push { transaction, weights } => Self::Push { transaction, weights: weights.caught() },
            Self::UpdateModelWeight { weights, options } => {
                Self::UpdateModelWeight { weights: weights.map(Payload::caught), options }
            }
            other => other,
        }
    }
}

impl Payload {
    pub(super) fn caught(self) -> Self {
        match self {
            Self::Source(source) => Self::source(CaughtSource::new(source)),
            other => other,
        }
    }

    /// What comes of a call that makes a payload.
    pub(super) fn made(make: impl FnOnce() -> Self) -> Self {
        match catch_unwind(AssertUnwindSafe(make)) {
            Ok(payload) => payload.caught(),
            Err(_) => Self::source(CaughtSource { source: None, panicked: AtomicBool::new(true) }),
        }
    }
}

/// A source whose panics are errors.
struct CaughtSource {
    /// Taken by the drop.
    source: Option<Box<dyn WeightSource + Send>>,
    /// It panicked where no error can be given.
    panicked: AtomicBool,
}

impl CaughtSource {
    fn new(source: Box<dyn WeightSource + Send>) -> Self {
        Self { source: Some(source), panicked: AtomicBool::new(false) }
    }

    fn get(&mut self) -> Result<&mut Box<dyn WeightSource + Send>, SourceError> {
        let fine = !*self.panicked.get_mut();
        self.source.as_mut().filter(|_| fine).ok_or_else(panicked)
    }
}

impl WeightSource for CaughtSource {
    fn index(&mut self) -> Result<Vec<TensorSpec>, SourceError> {
        let source = self.get()?;
        caught(|| source.index())
    }

    fn unsupported(&self) -> &[UnsupportedTensor] {
        let Some(source) = &self.source else { return &[] };
        catch_unwind(AssertUnwindSafe(|| source.unsupported())).unwrap_or_else(|_| {
            // The next call says so.
            self.panicked.store(true, Ordering::Relaxed);
            &[]
        })
    }

    fn plan(&mut self, tensors: &[usize]) -> Result<(), SourceError> {
        let source = self.get()?;
        caught(|| source.plan(tensors))
    }

    fn read(&mut self, tensor: usize, sink: &mut dyn FnMut(&[u8])) -> Result<(), SourceError> {
        let source = self.get()?;
        caught(|| source.read(tensor, sink))
    }

    fn reader(&mut self, tensor: usize) -> Result<Option<Box<dyn TensorReader + '_>>, SourceError> {
        let source = self.get()?;
        let reader = caught(|| source.reader(tensor))?;
        Ok(reader.map(|reader| Box::new(CaughtReader(Some(reader))) as Box<dyn TensorReader>))
    }

    #[cfg(feature = "cuda")]
    fn gpu_memory(&mut self, tensor: usize) -> Result<Option<crate::GpuMemory>, SourceError> {
        let source = self.get()?;
        caught(|| source.gpu_memory(tensor))
    }

    fn finish(&mut self) -> Result<(), SourceError> {
        let source = self.get()?;
        caught(|| source.finish())
    }
}

impl Drop for CaughtSource {
    fn drop(&mut self) {
        let source = self.source.take();
        quietly(|| drop(source));
    }
}

struct CaughtReader<'a>(Option<Box<dyn TensorReader + 'a>>);

impl TensorReader for CaughtReader<'_> {
    fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), SourceError> {
        let reader = self.0.as_ref().ok_or_else(panicked)?;
        caught(|| reader.read_at(offset, out))
    }
}

impl Drop for CaughtReader<'_> {
    fn drop(&mut self) {
        let reader = self.0.take();
        quietly(|| drop(reader));
    }
}
