//! The task: two-digit sums and differences with a carry. The reward is 1 for a right answer, else 0.

use std::error::Error;

use dormouse::{Awake, Engine, Request};
use tokenizers::Tokenizer;

/// Sums, in the tokens of one model.
pub struct Sums {
    tokenizer: Tokenizer,
}

/// What a batch of rollouts earned and cost.
pub struct Reward {
    /// Share of right answers.
    pub mean: f32,
    /// Tokens generated.
    pub tokens: usize,
    /// Prompt tokens of all samples.
    pub prompt_tokens: usize,
    /// Of these, found in the KV cache.
    pub cached_tokens: usize,
}

struct Problem {
    text: String,
    answer: i32,
}

impl Sums {
    /// Tokens of the longest answer, its work shown: `(18)198<eos>`.
    const ANSWER_TOKENS: usize = 8;

    pub fn new(model: &str) -> Result<Self, Box<dyn Error>> {
        let tokenizer = Tokenizer::from_file(format!("{model}/tokenizer.json")).map_err(|e| e.to_string())?;
        Ok(Self { tokenizer })
    }

    /// Rolls out `samples` answers to each of `prompts` problems.
    pub fn rollout(
        &self,
        engine: &Engine<Awake>,
        seed: u64,
        prompts: usize,
        samples: usize,
    ) -> Result<Reward, Box<dyn Error>> {
        self.answer(engine, &problems(seed, prompts, false), |request, index| {
            request.samples(samples).temperature(1.0).seed(seed.wrapping_mul(1009).wrapping_add(index as u64))
        })
    }

    /// The likeliest answers to problems that are never trained on.
    pub fn held_out(&self, engine: &Engine<Awake>, prompts: usize) -> Result<Reward, Box<dyn Error>> {
        self.answer(engine, &problems(u64::MAX, prompts, true), |request, _| request.temperature(0.0))
    }

    fn answer(
        &self,
        engine: &Engine<Awake>,
        problems: &[Problem],
        sampling: impl Fn(Request, usize) -> Request,
    ) -> Result<Reward, Box<dyn Error>> {
        let mut requests = Vec::new();
        for (index, problem) in problems.iter().enumerate() {
            let encoding = self.tokenizer.encode(problem.text.as_str(), true).map_err(|e| e.to_string())?;
            let request = Request::new(encoding.get_ids()).max_new_tokens(Self::ANSWER_TOKENS);
            requests.push(sampling(request, index));
        }
        let mut reward = Reward { mean: 0.0, tokens: 0, prompt_tokens: 0, cached_tokens: 0 };
        let mut answers = 0;
        for (output, problem) in engine.generate(&requests)?.iter().zip(problems) {
            for completion in &output.completions {
                let text = self.tokenizer.decode(&completion.tokens, true).map_err(|e| e.to_string())?;
                reward.mean += f32::from(u8::from(is_right(&text, problem.answer)));
                reward.tokens += completion.tokens.len();
                reward.prompt_tokens += output.prompt.len();
                reward.cached_tokens += completion.cached_tokens;
                answers += 1;
            }
        }
        reward.mean /= answers as f32;
        Ok(reward)
    }
}

/// Whether the number after the work (if it is shown, in brackets) is the answer.
fn is_right(text: &str, answer: i32) -> bool {
    let after_work = text.rsplit(')').next().unwrap_or_default().trim();
    let number: String = after_work
        .chars()
        .enumerate()
        .take_while(|&(i, c)| c.is_ascii_digit() || (i == 0 && c == '-'))
        .map(|(_, c)| c)
        .collect();
    number == answer.to_string()
}

/// Problems of this seed that need a carry (or a borrowed ten).
fn problems(seed: u64, count: usize, held_out: bool) -> Vec<Problem> {
    let mut random = crate::trainer::Random::new(seed);
    let mut problems = Vec::new();
    while problems.len() < count {
        let mut draw = || 10 + (random.next() >> 33) as i32 % 90;
        let (a, b) = (draw(), draw());
        let plus = random.next() >> 63 == 0;
        let (a, b) = if plus { (a, b) } else { (a.max(b), a.min(b)) };
        let carries = if plus { a % 10 + b % 10 > 9 } else { a % 10 < b % 10 };
        // The making script of the model holds the same problems out.
        if carries && ((3 * a + 5 * b) % 11 == 0) == held_out {
            let (sign, answer) = if plus { ('+', a + b) } else { ('-', a - b) };
            problems.push(Problem { text: format!("{a}{sign}{b}="), answer });
        }
    }
    problems
}
