//! The worker pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::device::cpu::pool::Pool;

#[test]
fn every_task_runs_once_in_thousands_of_jobs() {
    for threads in [1, 2, 3, 9] {
        let pool = Pool::new(threads).unwrap();
        for job in 0..2000 {
            let counts: Vec<AtomicUsize> = (0..job % 23).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(counts.len(), &|task| {
                counts[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn sleeping_workers_wake() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(2));
        let done = AtomicUsize::new(0);
        pool.for_each(3, &|_| {
            std::thread::sleep(Duration::from_millis(1));
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 3);
    }
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
    let pool = Pool::new(4).unwrap();
    for bad in 0..40 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(40, &|task| {
                assert!(task != bad, "task {task}");
                std::thread::yield_now();
            });
        }));
        let payload = outcome.unwrap_err();
        assert_eq!(*payload.downcast_ref::<String>().unwrap(), format!("task {bad}"));
        let done = AtomicUsize::new(0);
        pool.for_each(10, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 10);
    }
}

#[test]
fn several_callers_and_nested_jobs_work_at_once() {
    let pool = Pool::new(3).unwrap();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..100 {
                    pool.for_each(5, &|_| {
                        pool.for_each(3, &|_| {
                            done.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(done.into_inner(), 4 * 100 * 15);
}

#[test]
fn idle_workers_use_no_processor_time() {
    // Clock ticks of this process's own workers, by name.
    let ticks = || -> u64 {
        let mut sum = 0;
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
            if stat.contains("(idle-test-") {
                let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
                sum += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
            }
        }
        sum
    };
    let pool = Pool::named(3, "idle-test").unwrap();
    pool.for_each(100, &|_| std::thread::yield_now());
    std::thread::sleep(Duration::from_millis(5));
    let before = ticks();
    std::thread::sleep(Duration::from_millis(200));
    assert!(ticks() - before <= 1, "idle workers ran");
    drop(pool);
}
