//! Metrics as Prometheus reads them.
//!
//! Source: Prometheus documentation, "Exposition formats", text format 0.0.4.

use std::fmt::Write;

use super::{Lifecycle, Metrics};

impl Metrics {
    /// The text of `/metrics`: each family with its type and meaning. Names begin with `dormouse_`; times are in
    /// seconds, memory in bytes.
    pub fn render_prometheus(&self) -> String {
        let mut text = Text(String::with_capacity(8 << 10));
        self.render_state(&mut text);
        self.render_requests(&mut text);
        self.render_engine(&mut text);
        self.render_control(&mut text);
        text.0
    }

    fn render_state(&self, text: &mut Text) {
        text.family("state", "gauge", "1 for the state that the engine is in");
        for lifecycle in Lifecycle::ALL {
            let is = u8::from(lifecycle == self.state.lifecycle);
            text.sample("state", &[("state", lifecycle.as_str())], is);
        }
        text.one("paused", "gauge", "whether the controller is paused", u8::from(self.state.paused));
        text.one("admitting", "gauge", "whether requests are accepted", u8::from(self.state.admitting));
        text.one("epoch", "counter", "times that admission was closed", self.state.epoch);
        text.family("weights_version", "gauge", "counter of the weights' version; the labels say which");
        if let Some(version) = &self.state.version {
            let digest = version.digest.to_string();
            let label = version.label.as_deref().unwrap_or_default();
            text.sample("weights_version", &[("digest", &digest), ("label", label)], version.counter);
        }
        text.family("memory_bytes", "gauge", "memory by part");
        let memory = &self.memory;
        for (part, bytes) in [
            ("weights", memory.weights_bytes),
            ("parked_weights", memory.parked_bytes),
            ("staging", memory.staging_bytes),
            ("device", memory.device_bytes),
            ("kv_cache", memory.kv_cache_bytes),
            ("workspace", memory.workspace_bytes),
        ] {
            text.sample("memory_bytes", &[("part", part)], bytes);
        }
    }

    fn render_requests(&self, text: &mut Text) {
        text.one("requests_live", "gauge", "requests that have not ended", self.live_requests);
        text.one("requests_aside", "gauge", "of them: not in the engine now", self.requests_aside);
        text.one("requests_accepted_total", "counter", "requests accepted", self.accepted);
        text.family("requests_ended_total", "counter", "requests that have ended, by how");
        for (how, count) in [("finished", self.finished), ("aborted", self.aborted), ("failed", self.failed)]
        {
            text.sample("requests_ended_total", &[("how", how)], count);
        }
        text.family("requests_refused_total", "counter", "requests refused, by kind");
        for (kind, count) in &self.refused {
            text.sample("requests_refused_total", &[("kind", kind)], count);
        }
    }

    fn render_engine(&self, text: &mut Text) {
        let engine = &self.engine;
        text.one("sequences_waiting", "gauge", "sequences that wait for blocks", engine.waiting);
        text.one("sequences_running", "gauge", "sequences computed in each step", engine.running);
        text.family("kv_blocks", "gauge", "blocks of the KV cache, by what they hold");
        for (holds, blocks) in [
            ("nothing", engine.blocks_free),
            ("cached", engine.blocks_cached),
            ("running", engine.blocks_owned),
        ] {
            text.sample("kv_blocks", &[("holds", holds)], blocks);
        }
        text.one("steps_total", "counter", "steps", engine.steps);
        text.one(
            "computed_tokens_total",
            "counter",
            "tokens computed, of prompts, too",
            engine.computed_tokens,
        );
        text.one("sampled_tokens_total", "counter", "tokens sampled", engine.sampled_tokens);
        text.one(
            "cached_tokens_total",
            "counter",
            "prompt tokens found in the prefix cache",
            engine.cached_tokens,
        );
        text.one("prompt_tokens_total", "counter", "prompt tokens of samples begun", engine.prompt_tokens);
        text.one("prefix_cache_hit_ratio", "gauge", "cached of all prompt tokens so far", self.hit_ratio());
        text.one("preemptions_total", "counter", "sequences that lost their blocks", engine.preemptions);
    }

    /// Share of prompt tokens whose keys and values were found; 0 before the first.
    pub fn hit_ratio(&self) -> f64 {
        match self.engine.prompt_tokens {
            0 => 0.0,
            all => self.engine.cached_tokens as f64 / all as f64,
        }
    }

    fn render_control(&self, text: &mut Text) {
        text.one("control_queue", "gauge", "control requests that wait", self.control_queue);
        text.family("control_total", "counter", "control requests answered, by operation and outcome");
        for ((operation, outcome), count) in &self.operations {
            text.sample("control_total", &[("operation", operation), ("outcome", outcome)], count);
        }
        text.family("phase_seconds_total", "counter", "time spent, by phase");
        for (phase, time) in &self.phases {
            text.sample("phase_seconds_total", &[("phase", phase)], time.total.as_secs_f64());
        }
        text.family("phase_count_total", "counter", "times that a phase was gone through");
        for (phase, time) in &self.phases {
            text.sample("phase_count_total", &[("phase", phase)], time.count);
        }
        text.family("phase_last_seconds", "gauge", "time that the phase took the last time");
        for (phase, time) in &self.phases {
            text.sample("phase_last_seconds", &[("phase", phase)], time.last.as_secs_f64());
        }
        text.one("weights_received_bytes_total", "counter", "weights received", self.received_bytes);
        let speed = self.received_bytes_per_s;
        text.one("weights_received_bytes_per_second", "gauge", "speed of the last load or update", speed);
    }
}

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.0.push_str(&format!("# HELP dormouse_{name} {help}\n# TYPE dormouse_{name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str("dormouse_");
        self.0.push_str(name);
        for (at, (label, text)) in labels.iter().enumerate() {
            self.0.push(if at == 0 { '{' } else { ',' });
            self.0.push_str(label);
            self.0.push_str("=\"");
            for character in text.chars() {
                match character {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    other => self.0.push(other),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        writeln!(self.0, " {value}").expect("a string takes everything");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }
}
