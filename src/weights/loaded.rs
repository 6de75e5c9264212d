//! Weights of an engine that is about to wake: whole, or torn by an update in place that did not commit.

use std::sync::Arc;

use super::intake::Memory;
use super::{Identity, ResidentWeights, WeightLayout, WeightVersion};
use crate::device::{Arena, DeviceError};

/// Resident weights that updates may change.
#[derive(Debug)]
pub(crate) struct LoadedWeights {
    arena: Arena,
    layout: Arc<WeightLayout>,
    identity: Result<Identity, Torn>,
}

/// The memory holds parts of two sets of weights, or of one and a half.
#[derive(Debug, Clone)]
pub(crate) struct Torn {
    /// Version of the last whole weights.
    pub(crate) last: WeightVersion,
}

impl LoadedWeights {
    pub(crate) fn new(weights: ResidentWeights, layout: Arc<WeightLayout>) -> Self {
        let (arena, identity) = weights.into_parts();
        Self { arena, layout, identity: Ok(identity) }
    }

    /// What the weights are, if they are whole.
    pub(crate) fn identity(&self) -> Result<&Identity, &Torn> {
        self.identity.as_ref()
    }

    /// Version of the weights, or of the last whole ones.
    pub(crate) fn last_version(&self) -> &WeightVersion {
        match &self.identity {
            Ok(identity) => &identity.version,
            Err(torn) => &torn.last,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.arena.committed()
    }

    /// The memory, in the resident layout; what it holds is weights only if they are whole.
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The weights, if they are whole.
    pub(crate) fn into_resident(self) -> Result<ResidentWeights, Self> {
        match self.identity {
            Ok(identity) => Ok(ResidentWeights::new(self.arena, self.layout, identity)),
            Err(_) => Err(self),
        }
    }

    /// Puts the pages of `staged` in place: same addresses, new weights. On an error nothing has changed.
    pub(crate) fn replace(&mut self, staged: Arena, identity: Identity) -> Result<(), DeviceError> {
        self.arena.adopt(staged)?;
        self.identity = Ok(identity);
        Ok(())
    }

    /// What was written in place is whole.
    pub(crate) fn mend(&mut self, identity: Identity) {
        self.identity = Ok(identity);
    }

    /// Gives the memory back and keeps the address range.
    pub(crate) fn release(self) -> (Arena, usize) {
        let mut arena = self.arena;
        let freed = arena.decommit();
        (arena, freed)
    }
}

/// An update in place: the first write tears the weights.
impl Memory for LoadedWeights {
    fn arena(&mut self) -> Option<&mut Arena> {
        if let Ok(identity) = &self.identity {
            self.identity = Err(Torn { last: identity.version.clone() });
        }
        Some(&mut self.arena)
    }
}
