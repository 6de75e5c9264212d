//! The pool against a naive model that knows blocks by their content.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const DIGEST: [u8; 32] = [7; 32];

/// Four keys for everything: nearly every lookup meets a collision.
pub(crate) fn two_bit_key(parent: &BlockKey, tokens: &[u32]) -> BlockKey {
    let mut key = [0; 32];
    key[0] = chained_blake3(parent, tokens).0[0] & 3;
    BlockKey(key)
}

fn salt(namespace: u8) -> Option<Salt> {
    (namespace > 0).then(|| Salt([namespace].as_slice().into()))
}

/// A sequence in the pool and in the model.
struct Holder {
    table: BlockTable,
    model: Vec<usize>,
}

#[derive(Default)]
struct ModelBlock {
    holders: u32,
    content: Option<(u8, Vec<u32>)>,
    released: u64,
}

/// Blocks are found by scanning, evicted by scanning, and never reused.
struct Model {
    total: usize,
    cap: usize,
    blocks: Vec<ModelBlock>,
    moment: u64,
}

impl Model {
    fn owned(&self) -> usize {
        self.blocks.iter().filter(|block| block.holders > 0).count()
    }

    fn cached(&self) -> usize {
        self.blocks.iter().filter(|block| block.holders == 0 && block.content.is_some()).count()
    }

    fn find(&self, namespace: u8, prefix: &[u32]) -> Option<usize> {
        self.blocks
            .iter()
            .position(|block| block.content.as_ref().is_some_and(|c| c.0 == namespace && c.1 == prefix))
    }

    fn evict(&mut self) {
        let cached = self.blocks.iter_mut().filter(|block| block.holders == 0 && block.content.is_some());
        cached.min_by_key(|block| block.released).unwrap().content = None;
    }

    fn take(&mut self) -> usize {
        if self.owned() + self.cached() == self.total {
            self.evict();
        }
        self.blocks.push(ModelBlock { holders: 1, ..ModelBlock::default() });
        self.blocks.len() - 1
    }

    fn let_go(&mut self, block: usize) {
        self.moment += 1;
        let block = &mut self.blocks[block];
        block.holders -= 1;
        block.released = self.moment;
        if self.cached() > self.cap {
            self.evict();
        }
    }
}

struct Pair {
    pool: BlockPool,
    model: Model,
    holders: Vec<Holder>,
}

impl Pair {
    fn new(block_size: usize, total: usize, cache: PrefixCache, key_fn: KeyFn) -> Self {
        let pool = BlockPool::new(block_size, total, cache, DIGEST, key_fn);
        let model = Model { total, cap: pool.max_cached, blocks: Vec::new(), moment: 0 };
        Self { pool, model, holders: Vec::new() }
    }

    /// Enters a sequence as the scheduler does; `look_up: false` computes what may be cached already.
    fn enter(&mut self, namespace: u8, tokens: &[u32], look_up: bool) -> Option<usize> {
        let size = self.pool.block_size();
        let mut keys = Vec::new();
        self.pool.extend_keys(&mut keys, salt(namespace).as_ref(), tokens);
        let keys_used = if look_up && self.pool.caches_prefixes() { &keys[..] } else { &[] };
        let prefix = self.pool.lookup(keys_used, salt(namespace).as_ref(), tokens);
        let mut hits = Vec::new();
        for end in (1..=keys_used.len()).map(|blocks| blocks * size) {
            let Some(block) = self.model.find(namespace, &tokens[..end]) else { break };
            hits.push(block);
        }
        assert_eq!(prefix.blocks.len(), hits.len(), "lookup is not the longest cached prefix");
        let cached_hits = prefix.blocks.iter().filter(|&&block| self.pool.is_cached(block)).count();
        if self.pool.blocks_for(tokens.len()) - hits.len() > self.pool.available() - cached_hits {
            return None;
        }
        let mut table = self.pool.hold(&prefix.blocks);
        self.pool.grow(&mut table, tokens.len());
        let mut model = hits.clone();
        hits.iter().for_each(|&block| self.model.blocks[block].holders += 1);
        while model.len() < table.len() {
            model.push(self.model.take());
        }
        if self.pool.caches_prefixes() {
            let mut parent = prefix.parent;
            let mut own = Vec::new();
            for index in hits.len()..tokens.len() / size {
                let (start, end) = (index * size, (index + 1) * size);
                parent = self.pool.index_block(&mut table, index, keys[index], parent, &tokens[start..end]);
                match self.model.find(namespace, &tokens[..end]) {
                    Some(block) => {
                        self.model.blocks[block].holders += 1;
                        own.push(std::mem::replace(&mut model[index], block));
                    }
                    None => {
                        self.model.blocks[model[index]].content = Some((namespace, tokens[..end].to_vec()))
                    }
                }
            }
            self.pool.check(self.tables().chain([&table])).unwrap();
            self.pool.settle(&mut table);
            own.into_iter().for_each(|block| self.model.let_go(block));
        }
        self.holders.push(Holder { table, model });
        Some(hits.len())
    }

    fn leave(&mut self, which: usize) {
        if self.holders.is_empty() {
            return;
        }
        let holder = self.holders.remove(which % self.holders.len());
        self.pool.release(holder.table);
        holder.model.iter().rev().for_each(|&block| self.model.let_go(block));
    }

    fn share(&mut self, which: usize, count: usize) {
        if self.holders.is_empty() {
            return;
        }
        let holder = &self.holders[which % self.holders.len()];
        let count = count % (holder.table.len() + 1);
        let model = holder.model[..count].to_vec();
        let table = self.pool.share(&holder.table, count);
        model.iter().for_each(|&block| self.model.blocks[block].holders += 1);
        self.holders.push(Holder { table, model });
    }

    fn clear(&mut self) {
        self.pool.clear_index();
        self.model.blocks.iter_mut().for_each(|block| block.content = None);
    }

    fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.holders.iter().map(|holder| &holder.table)
    }

    fn check(&self) {
        self.pool.check(self.tables()).unwrap();
        assert_eq!(self.pool.owned(), self.model.owned());
        assert_eq!(self.pool.cached(), self.model.cached());
        assert_eq!(self.pool.free() + self.pool.cached() + self.pool.owned(), self.pool.total());
    }
}

#[derive(Debug, Clone)]
enum Op {
    Enter { namespace: u8, tokens: Vec<u32>, look_up: bool },
    Leave(usize),
    Share(usize, usize),
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0u8..2, vec(0u32..2, 1..14), prop::bool::weighted(0.8))
            .prop_map(|(namespace, tokens, look_up)| Op::Enter { namespace, tokens, look_up }),
        6 => any::<usize>().prop_map(Op::Leave),
        2 => any::<(usize, usize)>().prop_map(|(which, count)| Op::Share(which, count)),
        1 => Just(Op::Clear),
    ]
}

fn cache() -> impl Strategy<Value = PrefixCache> {
    prop_oneof![
        4 => Just(PrefixCache::Unlimited),
        2 => (0usize..4).prop_map(PrefixCache::AtMost),
        1 => Just(PrefixCache::Off),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pool_agrees_with_a_naive_model(
        block_size in 1usize..4,
        total in 1usize..16,
        cache in cache(),
        weak_hash in any::<bool>(),
        ops in vec(op(), 1..120),
    ) {
        let mut pair = Pair::new(block_size, total, cache, if weak_hash { two_bit_key } else { chained_blake3 });
        for op in ops {
            match op {
                Op::Enter { namespace, tokens, look_up } => {
                    pair.enter(namespace, &tokens, look_up);
                }
                Op::Leave(which) => pair.leave(which),
                Op::Share(which, count) => pair.share(which, count),
                Op::Clear => pair.clear(),
            }
            pair.check();
        }
    }
}

#[test]
fn b05_an_evicted_block_is_reachable_by_its_new_content_only() {
    let mut pair = Pair::new(2, 4, PrefixCache::Unlimited, chained_blake3);
    let prompt = |name: u32| [name, name + 1, name + 2, name + 3, name + 4, name + 5, name + 6, name + 7];
    for name in [0, 100, 200, 300, 400] {
        assert_eq!(pair.enter(0, &prompt(name), true), Some(0));
        pair.leave(0);
        pair.check();
    }
    assert_eq!(pair.enter(0, &prompt(400), true), Some(4));
    pair.leave(0);
    pair.clear();
    pair.check();
    assert_eq!(pair.pool.index.num_entries(), 0);
    for name in [0, 100] {
        assert_eq!(pair.enter(0, &prompt(name), true), Some(0));
        pair.leave(0);
        pair.check();
    }
}

#[test]
fn b50_two_bit_keys_find_exactly_what_is_there() {
    let mut pair = Pair::new(2, 64, PrefixCache::Unlimited, two_bit_key);
    for prompt in 0..16u32 {
        let tokens: Vec<u32> = (0..4).map(|bit| prompt >> bit & 1).collect();
        pair.enter(0, &tokens, true).unwrap();
        pair.leave(0);
    }
    for prompt in 0..16u32 {
        let tokens: Vec<u32> = (0..4).map(|bit| prompt >> bit & 1).collect();
        assert_eq!(pair.enter(0, &tokens, true), Some(2));
        pair.check();
    }
}

#[test]
fn b51_keys_differ_by_salt_by_parent_and_by_weights() {
    let keys = |digest: u8, salt: Option<&[u8]>, tokens: &[u32]| {
        let pool = BlockPool::new(2, 1, PrefixCache::Unlimited, [digest; 32], chained_blake3);
        let mut keys = Vec::new();
        pool.extend_keys(&mut keys, salt.map(|salt| Salt(salt.into())).as_ref(), tokens);
        keys
    };
    let key = keys(0, None, &[1, 2, 3, 4, 5]);
    assert_eq!(key.len(), 2);
    assert_eq!(keys(0, None, &[1, 2, 3, 4])[..], key[..]);
    for other in
        [keys(1, None, &[1, 2, 3, 4]), keys(0, Some(b""), &[1, 2, 3, 4]), keys(0, Some(b"a"), &[1, 2, 3, 4])]
    {
        assert!(other.iter().all(|other| !key.contains(other)));
    }
    assert_ne!(keys(0, None, &[9, 2, 3, 4])[1], key[1], "same tokens, other parent");
}

#[test]
fn the_least_recently_used_leaf_goes_first() {
    let mut pair = Pair::new(1, 4, PrefixCache::Unlimited, chained_blake3);
    pair.enter(0, &[1, 2], true);
    pair.enter(0, &[5, 6], true);
    pair.leave(0);
    pair.leave(0);
    pair.enter(0, &[9], true);
    pair.check();
    assert_eq!(pair.pool.cached(), 3);
    pair.leave(0);
    // [1, 2] lost its leaf, the younger [5, 6] nothing.
    assert_eq!(pair.enter(0, &[1, 2], true), Some(1));
    pair.leave(0);
    assert_eq!(pair.enter(0, &[5, 6], true), Some(1), "[2] came back at the cost of [6]");
}

#[test]
fn check_reports_a_leaked_table() {
    let mut pool = BlockPool::new(1, 2, PrefixCache::Off, DIGEST, chained_blake3);
    let mut table = BlockTable::default();
    pool.grow(&mut table, 1);
    assert_eq!(pool.check([&table].into_iter()), Ok(()));
    drop(table);
    let fault = pool.check(std::iter::empty()).unwrap_err();
    assert_eq!(fault, KvFault::Holders { block: 0, counted: 1, actual: 0 });
}

#[test]
fn a_slot_is_block_times_size_plus_offset() {
    let mut pool = BlockPool::new(3, 4, PrefixCache::Off, DIGEST, chained_blake3);
    let mut table = BlockTable::default();
    pool.grow(&mut table, 5);
    assert_eq!(table.blocks(), [BlockId(0), BlockId(1)]);
    assert_eq!((0..5).map(|position| table.slot(position, 3)).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}
