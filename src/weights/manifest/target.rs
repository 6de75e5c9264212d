//! Where each offered tensor goes: under which name, to which tensor of the model, or nowhere.

use super::mismatch::check_one;
use super::{EMBEDDING, LM_HEAD, Manifest, WeightsMismatch, is_buffer};
use crate::weights::names::Mapped;
use crate::weights::{LoadOptions, TensorSpec, UnsupportedTensor};

/// Where an offered tensor goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    /// To this tensor of the manifest.
    Tensor(usize),
    /// It is the head of a model whose head is its embedding: it must equal that tensor of the manifest.
    TiedHead { embedding: usize },
    /// Nowhere: it is no parameter.
    Ignored,
}

/// What is accepted.
#[derive(Debug)]
pub(crate) struct Accept<'a> {
    pub(crate) options: &'a LoadOptions,
    /// By position in the manifest: whether the tensor is to be brought.
    pub(crate) wanted: &'a [bool],
    /// Whether all that is wanted must be offered at once.
    pub(crate) complete: bool,
}

impl Manifest {
    /// Assigns every offered tensor its target. `has` tells what arrived before.
    ///
    /// # Errors
    /// Every fault of the offer.
    pub(crate) fn assign(
        &self,
        offered: &[TensorSpec],
        unsupported: &[UnsupportedTensor],
        accept: &Accept<'_>,
        has: &dyn Fn(Target) -> bool,
    ) -> Result<Vec<Target>, Box<WeightsMismatch>> {
        let mut faults = WeightsMismatch::default();
        let mut taken = vec![false; self.tensors.len()];
        let mut head_taken = false;
        let mut targets = Vec::with_capacity(offered.len());
        for tensor in offered {
            let Some(target) = self.target(tensor, accept, &mut faults) else { continue };
            targets.push(target);
            let twice = match target {
                Target::Tensor(position) => std::mem::replace(&mut taken[position], true),
                Target::TiedHead { .. } => std::mem::replace(&mut head_taken, true),
                Target::Ignored => continue,
            };
            if twice || has(target) {
                faults.duplicate.push(tensor.name.clone());
            }
        }
        for tensor in unsupported {
            self.check_unsupported(tensor, accept, &mut taken, &mut faults);
        }
        if accept.complete {
            let absent = (0..self.tensors.len()).filter(|&position| {
                accept.wanted[position] && !taken[position] && !has(Target::Tensor(position))
            });
            faults.missing.extend(absent.map(|position| self.tensors[position].name.clone()));
        }
        faults.into_result().map(|()| targets)
    }

    /// The target of one offered tensor. If it has none, or doesn't fit, a fault is noted.
    pub(crate) fn target(
        &self,
        offered: &TensorSpec,
        accept: &Accept<'_>,
        faults: &mut WeightsMismatch,
    ) -> Option<Target> {
        let name = match accept.options.names.map(&offered.name) {
            Mapped::Tensor(name) => name,
            Mapped::Ignored => return Some(Target::Ignored),
        };
        let target = match (self.position(&name), self.tied_to) {
            (Some(position), _) => Target::Tensor(position),
            (None, Some(embedding)) if name == LM_HEAD => Target::TiedHead { embedding },
            (None, _) if is_buffer(&name) => return Some(Target::Ignored),
            (None, _) => {
                faults.unknown.push(offered.name.clone());
                return None;
            }
        };
        let (Target::Tensor(position) | Target::TiedHead { embedding: position }) = target else {
            return Some(target);
        };
        if !accept.wanted[position] {
            faults.not_asked.push(offered.name.clone());
            return None;
        }
        check_one(&self.tensors[position], offered, accept.options, faults);
        Some(target)
    }

    /// Notes a needed tensor that is there in an impossible element type, which makes it not missing.
    fn check_unsupported(
        &self,
        tensor: &UnsupportedTensor,
        accept: &Accept<'_>,
        taken: &mut [bool],
        faults: &mut WeightsMismatch,
    ) {
        let Mapped::Tensor(name) = accept.options.names.map(&tensor.name) else { return };
        let position = self.position(&name).filter(|&position| accept.wanted[position]);
        if position.is_some() || (self.tied_to.is_some() && name == LM_HEAD) {
            faults.unsupported_dtype.push(tensor.clone());
        }
        if let Some(position) = position
            && std::mem::replace(&mut taken[position], true)
        {
            faults.duplicate.push(tensor.name.clone());
        }
    }

    /// Whether a tensor has a row for each word, so that rows beyond the vocabulary may be padding.
    pub(super) fn has_vocabulary_rows(name: &str) -> bool {
        name == EMBEDDING || name == LM_HEAD
    }
}
