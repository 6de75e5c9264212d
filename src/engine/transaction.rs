//! What a load and an update have in common: weights come in piece by piece, and count when all are there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CommitError;
use super::core::Core;
use crate::device::Transfer;
use crate::weights::{Identity, Intake, PushError, Received, WeightVersion};

/// Weights that come in for one version.
#[derive(Debug)]
pub(super) struct Transaction {
    pub(super) intake: Intake,
    label: Option<Arc<str>>,
    counter: u64,
    begun: Instant,
    pub(super) receiving: Duration,
    _transfer: Transfer,
}

/// What a transaction took in, under the version it is to have.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) identity: Identity,
    pub(super) received: Received,
    /// Since the transaction was begun.
    pub(super) open: Duration,
    /// Within pushes.
    pub(super) receiving: Duration,
}

impl Transaction {
    pub(super) fn new(core: &Core, intake: Intake, label: Option<Arc<str>>) -> Self {
        let counter = core.version_counter + 1;
        let transfer = Transfer(core.parts.device.clone());
        Self { intake, label, counter, begun: Instant::now(), receiving: Duration::ZERO, _transfer: transfer }
    }

    /// Runs a push.
    pub(super) fn push(
        &mut self,
        push: impl FnOnce(&mut Intake) -> Result<(), PushError>,
    ) -> Result<(), PushError> {
        let begin = Instant::now();
        let pushed = push(&mut self.intake);
        self.receiving += begin.elapsed();
        if let Err(error) = &pushed {
            tracing::warn!(%error, "weights refused");
        }
        pushed
    }

    pub(super) fn finish(self) -> Result<Arrived, CommitError> {
        let received = self.intake.finish()?;
        let version = WeightVersion { counter: self.counter, digest: received.digest, label: self.label };
        let identity = Identity { version, digests: received.digests.clone() };
        Ok(Arrived { identity, received, open: self.begun.elapsed(), receiving: self.receiving })
    }
}

/// The pushes of a load or an update; `$memory` is where it writes.
macro_rules! forward_pushes {
    ([$($generics:tt)*] $target:ty, |$this:ident| $memory:expr) => {
        impl<$($generics)*> $target {
            /// Takes one whole tensor. Its bytes are copied: nothing refers to them when this returns.
            ///
            /// # Errors
            /// [`PushError`](crate::PushError); the transaction is over.
            pub fn push(
                &mut self,
                name: &str,
                tensor: &impl safetensors::View,
            ) -> Result<(), crate::PushError> {
                let $this = self;
                let memory = $memory;
                $this.transaction.push(|intake| intake.push(memory, name, tensor))
            }

            /// Takes a piece of a tensor: `bytes` (little-endian, row-major, any alignment) that begin `offset`
            /// bytes into it. The pieces of a tensor may come in any order, between those of others; those that
            /// come before the ones in front of them wait in host memory, at most 65,536.
            ///
            /// # Errors
            /// [`PushError`](crate::PushError); the transaction is over.
            pub fn push_piece(
                &mut self,
                tensor: &crate::TensorSpec,
                offset: usize,
                bytes: &[u8],
            ) -> Result<(), crate::PushError> {
                let $this = self;
                let memory = $memory;
                $this.transaction.push(|intake| intake.push_piece(memory, tensor, offset, bytes))
            }

            /// Takes all pieces of a bucket. Names, shapes and dtypes of all are checked before the first is
            /// stored. Nothing refers to the bucket when this returns.
            ///
            /// # Errors
            /// [`PushError`](crate::PushError); the transaction is over.
            pub fn push_bucket(&mut self, bucket: &crate::Bucket<'_>) -> Result<(), crate::PushError> {
                let $this = self;
                let memory = $memory;
                $this.transaction.push(|intake| intake.push_bucket(memory, bucket))
            }

            /// Takes all pieces of a bucket on the engine's GPU, without a detour over the host. Names, shapes and
            /// dtypes of all are checked before the first is stored. When this returns, successful or not, the bucket's
            /// memory is no longer looked at and nothing of it is open: its owner may overwrite it.
            ///
            /// # Errors
            /// [`PushError`](crate::PushError); the transaction is over.
            #[cfg(feature = "cuda")]
            pub fn push_gpu_bucket(&mut self, bucket: &crate::GpuBucket) -> Result<(), crate::PushError> {
                let $this = self;
                let memory = $memory;
                $this.transaction.push(|intake| intake.push_gpu_bucket(memory, bucket))
            }

            /// Takes every tensor of a source. All faults of its index are found before anything is read.
            ///
            /// # Errors
            /// [`PushError`](crate::PushError); the transaction is over.
            pub fn push_all(&mut self, mut source: impl WeightSource) -> Result<(), crate::PushError> {
                let $this = self;
                let memory = $memory;
                $this.transaction.push(|intake| intake.push_all(memory, &mut source, false))
            }
        }
    };
}
pub(super) use forward_pushes;
