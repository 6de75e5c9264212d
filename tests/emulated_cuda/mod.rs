//! The emulated CUDA driver: a `libcuda.so` whose devices are the CPU, for tests of the CUDA backend without a GPU.
//!
//! It is C++, compiled with the kernels when a test first needs it. Once [`Emulated::load`] has loaded it, cudarc finds
//! it as `libcuda.so`. So load it before anything asks cudarc for the driver.
//!
//! There are many devices, so that each test takes one of its own ([`Emulated::device`]): memory, faults, violations
//! and what is left over are counted per device. Work that is queued on a stream runs late, when somebody waits, in an
//! order drawn from a seed; what a real machine would leave undefined is counted as a violation.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]
#![allow(unsafe_code, reason = "calls into a library")]

use std::ffi::{CStr, CString, c_char};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Declares a struct of the library's functions and loads it.
macro_rules! hooks {
    ($($field:ident = $name:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Hooks {
            $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Hooks {
            fn of(library: &Library) -> Self {
                $(
                    // SAFETY: the library defines a function of this name and type (hooks.cpp).
                    let $field = unsafe { library.get($name.as_bytes()) };
                )*
                Self { $($field: *$field.expect(concat!($name, " is in the library")),)* }
            }
        }
    };
}

hooks! {
    new_ordinal = "emulated_new_ordinal": fn() -> i32;
    set_threads = "emulated_set_threads": fn(u32);
    allow_ipc_to_self = "emulated_allow_ipc_to_self": fn(bool);
    set_memory_limit = "emulated_set_memory_limit": fn(i32, u64);
    set_granularity = "emulated_set_granularity": fn(i32, u64);
    set_fill = "emulated_set_fill": fn(i32, u8);
    set_seed = "emulated_set_seed": fn(i32, u64);
    calls = "emulated_calls": fn(i32) -> u64;
    call_name = "emulated_call_name": fn(i32, u64) -> *const c_char;
    fail_call = "emulated_fail_call": fn(i32, *const c_char, u64, i32);
    fail_calls_from = "emulated_fail_calls_from": fn(i32, u64, i32);
    fault_pending = "emulated_fault_pending": fn(i32) -> bool;
    violations = "emulated_violations": fn(i32) -> u64;
    violation = "emulated_violation": fn(i32, u64) -> *const c_char;
    live = "emulated_live": fn(i32, u32) -> i64;
    used = "emulated_used": fn(i32) -> u64;
    take_peak = "emulated_take_peak": fn(i32) -> u64;
    queued = "emulated_queued": fn(i32) -> u64;
}

/// The loaded library. It stays loaded as long as the process.
pub struct Emulated {
    hooks: Hooks,
    _library: Library,
}

/// The ordinal of the calls that belong to no device: `cuInit`, and those without a context that name none.
pub const NO_DEVICE: i32 = -1;

/// `CUresult` values to inject.
pub const OUT_OF_MEMORY: i32 = 2;
pub const NO_DEVICE_FOUND: i32 = 100;
pub const ILLEGAL_ADDRESS: i32 = 700;
pub const LAUNCH_FAILED: i32 = 719;
pub const UNKNOWN: i32 = 999;

/// Kinds of things a program must end.
const KINDS: [&str; 13] = [
    "address ranges",
    "physical handles",
    "mappings",
    "allocations",
    "opened IPC handles",
    "host registrations",
    "host allocations",
    "streams",
    "events",
    "modules",
    "graphs",
    "executable graphs",
    "contexts",
];

impl Emulated {
    /// Builds the library if its sources changed since, and loads it.
    ///
    /// # Panics
    /// If it cannot be built: g++ is needed.
    pub fn load() -> &'static Self {
        static LOADED: OnceLock<Emulated> = OnceLock::new();
        LOADED.get_or_init(|| {
            let folder = build_folder();
            fs::create_dir_all(&folder).expect("a folder to build in");
            // Many test processes start at once: one builds, and none removes what another is about to load.
            let lock = File::create(folder.join("lock")).expect("a lock file");
            lock.lock().expect("the lock of the folder");
            let path = folder.join(format!("{:032x}.so", sources_hash()));
            if !path.exists() {
                build(&path);
            }
            // SAFETY: what the library does when it is loaded is to construct its own tables.
            let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
            let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Self { hooks: Hooks::of(&library), _library: library }
        })
    }

    /// A device that no other test of this process uses.
    pub fn device(&'static self) -> EmulatedDevice {
        // SAFETY: takes nothing.
        let ordinal = unsafe { (self.hooks.new_ordinal)() };
        assert!(ordinal >= 0, "all emulated devices are in use");
        self.device_at(ordinal)
    }

    /// A device of a test's own, with small pages, so that little memory has many pieces, memory full of NaNs, and an
    /// order of queued work of its own.
    pub fn adverse_device(&'static self) -> EmulatedDevice {
        let device = self.device();
        device.set_granularity(4096);
        device.set_fill(0xff);
        device.set_seed(u64::from(device.ordinal.unsigned_abs()) + 1);
        device
    }

    /// The device of an ordinal, or the calls of [`NO_DEVICE`].
    pub fn device_at(&'static self, ordinal: i32) -> EmulatedDevice {
        EmulatedDevice { ordinal, hooks: &self.hooks }
    }

    /// How many threads run the blocks of each kernel, in the whole process: at first one.
    pub fn set_threads(&self, threads: u32) {
        // SAFETY: takes any number.
        unsafe { (self.hooks.set_threads)(threads) }
    }

    /// Lets a process open its own IPC handles, which a real driver refuses.
    pub fn allow_ipc_to_self(&self, allowed: bool) {
        // SAFETY: takes any flag.
        unsafe { (self.hooks.allow_ipc_to_self)(allowed) }
    }
}

/// What a test sets and asks of one device.
#[derive(Clone, Copy)]
pub struct EmulatedDevice {
    pub ordinal: i32,
    hooks: &'static Hooks,
}

// SAFETY, of all calls below: the hooks take any ordinal and any values, and lock what they touch.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all, above")]
impl EmulatedDevice {
    /// How much memory the device has: 1 GiB at first. It may shrink while some is in use, as if others took it.
    pub fn set_memory_limit(self, bytes: u64) {
        unsafe { (self.hooks.set_memory_limit)(self.ordinal, bytes) }
    }

    /// Of physical memory and address ranges: 2 MiB at first, at least 4 KiB. Set it before memory is used.
    pub fn set_granularity(self, bytes: u64) {
        assert!(bytes.is_power_of_two() && bytes >= 4096, "a granularity of {bytes} bytes");
        unsafe { (self.hooks.set_granularity)(self.ordinal, bytes) }
    }

    /// What fresh device memory is filled with: 0xA5 at first; 0xFF makes it NaNs.
    pub fn set_fill(self, byte: u8) {
        unsafe { (self.hooks.set_fill)(self.ordinal, byte) }
    }

    /// The seed of the order in which queued work runs; 0 is the laziest order: only what is waited for.
    pub fn set_seed(self, seed: u64) {
        unsafe { (self.hooks.set_seed)(self.ordinal, seed) }
    }

    /// How many calls were made, of those that can fail.
    pub fn calls(self) -> u64 {
        unsafe { (self.hooks.calls)(self.ordinal) }
    }

    /// The names of the calls made from number `first` (0: all) on.
    pub fn call_names(self, first: u64) -> Vec<&'static str> {
        let name = |index| unsafe { (self.hooks.call_name)(self.ordinal, index) };
        (first..self.calls()).map(|index| text(name(index)).expect("a call that was made")).collect()
    }

    /// Makes the `from_now`-th call (1: the next one) fail, once. It does nothing then: work that a failed call should
    /// have waited for is still queued, what it should have released is still there.
    pub fn fail_call(self, from_now: u64, error: i32) {
        unsafe { (self.hooks.fail_call)(self.ordinal, ptr::null(), from_now, error) }
    }

    /// Makes the `from_now`-th call of one function fail, once: `fail_named("cuMemCreate", 3, OUT_OF_MEMORY)`. The
    /// names are those of [`call_names`](Self::call_names), without versions.
    pub fn fail_named(self, name: &str, from_now: u64, error: i32) {
        let name = CString::new(name).expect("a name without zeros");
        unsafe { (self.hooks.fail_call)(self.ordinal, name.as_ptr(), from_now, error) }
    }

    /// Whether the failure of [`fail_call`](Self::fail_call) or [`fail_named`](Self::fail_named) has not happened yet;
    /// it then no longer will.
    pub fn take_pending_failure(self) -> bool {
        let pending = unsafe { (self.hooks.fault_pending)(self.ordinal) };
        self.fail_call(0, 0);
        pending
    }

    /// The device is lost: all calls from the `from_now`-th on fail, and queued work never runs.
    pub fn lose(self, from_now: u64, error: i32) {
        unsafe { (self.hooks.fail_calls_from)(self.ordinal, from_now, error) }
    }

    /// Ends [`lose`](Self::lose).
    pub fn find_again(self) {
        self.lose(0, 0);
    }

    /// What was done that is undefined on a real machine.
    pub fn violations(self) -> Vec<String> {
        let count = unsafe { (self.hooks.violations)(self.ordinal) };
        let one = |index| unsafe { (self.hooks.violation)(self.ordinal, index) };
        (0..count).map(|index| text(one(index)).expect("a violation that was counted").to_owned()).collect()
    }

    /// What was made and not ended, in words: "2 streams, 1 mappings"; empty when nothing is left.
    pub fn live(self) -> String {
        let count = |kind| unsafe { (self.hooks.live)(self.ordinal, kind) };
        let counts = KINDS.iter().zip(0..).map(|(name, kind)| (count(kind), name));
        let alive = counts.filter(|(count, _)| *count != 0);
        alive.map(|(count, name)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    }

    /// Device memory in use, in bytes.
    pub fn used(self) -> u64 {
        unsafe { (self.hooks.used)(self.ordinal) }
    }

    /// The most device memory in use since the last call of this.
    pub fn take_peak(self) -> u64 {
        unsafe { (self.hooks.take_peak)(self.ordinal) }
    }

    /// How much work is queued and has not run.
    pub fn queued(self) -> u64 {
        unsafe { (self.hooks.queued)(self.ordinal) }
    }

    /// Asserts that nothing undefined was done, and that nothing is left.
    #[track_caller]
    pub fn assert_clean(self) {
        let violations = self.violations();
        assert!(violations.is_empty(), "device {}: {violations:#?}", self.ordinal);
        let live = self.live();
        let used = self.used();
        assert!(live.is_empty() && used == 0, "device {} still has {live} ({used} bytes)", self.ordinal);
    }
}

/// A text of the library, which never ends.
fn text(text: *const c_char) -> Option<&'static str> {
    // SAFETY: a null pointer or a C string that the library keeps.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
    Some(text.to_str().expect("UTF-8"))
}

fn sources_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated_cuda")
}

fn kernels_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// A folder in the build's own: test programs are in `target/PROFILE/deps`.
fn build_folder() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let profile = program.ancestors().nth(2).expect("a program in a folder of a build");
    profile.join("emulated_cuda")
}

/// Of all that goes into the library, and of the processor that it is compiled for.
fn sources_hash() -> u128 {
    let mut files = Vec::new();
    for folder in [sources_folder(), kernels_folder()] {
        let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let paths = entries.map(|entry| entry.expect("a readable entry").path());
        files.extend(paths.filter(|path| is_source(path)));
    }
    files.sort();
    let mut all = Vec::new();
    for file in files {
        all.extend_from_slice(file.as_os_str().as_encoded_bytes());
        all.extend(fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())));
    }
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    all.extend(processor.lines().find(|line| line.starts_with("flags")).unwrap_or_default().bytes());
    twox_hash::XxHash3_128::oneshot(&all)
}

fn is_source(path: &Path) -> bool {
    let extension = path.extension().unwrap_or_default();
    ["cpp", "h", "cu", "cuh", "map"].iter().any(|known| extension == *known)
        || path.ends_with("emulated_cuda/build")
}

fn build(library: &Path) {
    let script = sources_folder().join("build");
    let output = Command::new(&script).arg(library).arg(kernels_folder()).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "building the emulated CUDA driver failed:\n{errors}");
}
