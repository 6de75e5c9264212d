//! Pins: blocks of an ended sequence that stay, for the conversation's next turn.

use super::sequence::KvPrefix;
use super::{AddError, NewSequence, Scheduler, SeqId};
use crate::kv::Salt;

/// Names pinned blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PinId(pub(crate) u64);

/// The computed tokens of an ended sequence, with their blocks.
#[derive(Debug)]
pub(super) struct Pin {
    tokens: Vec<u32>,
    salt: Option<Salt>,
    pub(super) kv: KvPrefix,
}

impl Pin {
    pub(super) fn num_blocks(&self) -> usize {
        self.kv.table.len()
    }
}

impl Scheduler {
    /// Ends a sequence and keeps its blocks, for a sequence whose tokens continue the computed ones of this.
    /// Returns its tokens and the pin, or `None` if it neither waits nor runs. A preempted sequence has no
    /// blocks: its pin then keeps nothing, which is allowed.
    ///
    /// # Panics
    /// If the step in flight computes the sequence: what to keep is known only after it.
    pub(crate) fn finish_and_pin(&mut self, seq: SeqId) -> Option<(Vec<u32>, PinId)> {
        let sequence = self.sequences.get_mut(&seq)?;
        assert!(sequence.planned.is_none(), "sequence {} is in a step in flight", seq.0);
        let mut kv = std::mem::take(&mut sequence.kv);
        self.pool.truncate(&mut kv.table, self.pool.blocks_for(kv.computed));
        let sequence = self.remove(seq)?;
        let tokens = sequence.tokens[..kv.computed].to_vec();
        let id = PinId(self.next_pin);
        self.next_pin += 1;
        self.pins.insert(id, Pin { tokens, salt: sequence.salt, kv });
        self.debug_check();
        Some((sequence.tokens, id))
    }

    /// Lets pinned blocks go; full ones stay cached. Returns whether the pin existed.
    pub(crate) fn unpin(&mut self, pin: PinId) -> bool {
        let Some(pin) = self.pins.remove(&pin) else { return false };
        self.pool.release(pin.kv.table);
        self.debug_check();
        true
    }

    /// Lets go of the blocks that have been pinned longest. Returns whether there were any.
    pub(crate) fn unpin_oldest(&mut self) -> bool {
        self.pins.first_key_value().map(|(&pin, _)| pin).is_some_and(|pin| self.unpin(pin))
    }

    /// Moves a pin's blocks to the sequence that continues it. Blocks that hold what the sequence has to
    /// compute itself are let go instead, for it to find what it may use in the prefix cache.
    pub(super) fn consume_pin(&mut self, id: PinId, new: &NewSequence) -> Result<KvPrefix, AddError> {
        let pin = self.pins.get(&id).ok_or(AddError::UnknownPin { pin: id })?;
        let common_tokens =
            pin.tokens.iter().zip(&new.tokens).take_while(|(pinned, new)| pinned == new).count();
        if common_tokens < pin.tokens.len() {
            return Err(AddError::PinMismatch { common_tokens, pinned_tokens: pin.tokens.len() });
        }
        if pin.salt != new.salt {
            return Err(AddError::PinSaltDiffers);
        }
        let Some(pin) = self.pins.remove(&id) else { return Err(AddError::UnknownPin { pin: id }) };
        if pin.kv.computed > new.recompute_from.min(new.tokens.len() - 1) {
            self.pool.release(pin.kv.table);
            return Ok(KvPrefix::default());
        }
        Ok(pin.kv)
    }
}
