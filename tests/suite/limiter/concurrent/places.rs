//! Places are taken, held and freed, the same on each store.

use super::*;

/// Runs a test on a store of each kind.
async fn on_each_store(test: impl AsyncFn(Limiter)) {
    test(Limiter::new(MemoryStore::new())).await;
    let server = RedisServer::start();
    test(Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT))
        .await;
}

#[tokio::test]
async fn no_more_are_held_than_the_limit_and_each_is_freed_by_its_decision() {
    on_each_store(async |limiter: Limiter| {
        let mut held = Vec::new();
        for places in 1..=4 {
            let decision = enter(&limiter, &STREAMS).await;
            assert!(decision.is_allowed() && decision.holds_place());
            assert_eq!(
                (decision.binding().used, decision.remaining()),
                (places, 4 - places)
            );
            held.push(decision);
        }
        let refused = enter(&limiter, &STREAMS).await;
        assert!(!refused.is_allowed() && !refused.holds_place());
        assert_eq!(refused.retry_after(), Some(seconds(1)));
        assert_eq!(refused.binding().reset_after(), Duration::ZERO);

        let clone = held[0].clone();
        drop(held.remove(0));
        assert!(
            !enter(&limiter, &STREAMS).await.is_allowed(),
            "a clone holds the place"
        );
        drop(clone);
        until_held(&limiter, &STREAMS, 3).await;
        assert!(enter(&limiter, &STREAMS).await.is_allowed());
    })
    .await;
}

#[tokio::test]
async fn a_refusal_of_another_limit_takes_no_place_and_a_full_one_takes_no_units() {
    on_each_store(async |limiter: Limiter| {
        let requests = Limit::per_minute("requests", 3);
        let check = || check_of([charge(&requests, 1), charge(&STREAMS, 1)]);
        let held: Vec<_> = {
            let mut held = Vec::new();
            for _ in 0..3 {
                held.push(limiter.check_all(check()).await.unwrap());
            }
            held
        };
        assert!(held.iter().all(Decision::holds_place));
        assert_eq!(
            held[2].binding().limit.name(),
            "requests",
            "places do not hide the window"
        );
        assert!(!limiter.check_all(check()).await.unwrap().is_allowed());
        assert_eq!(
            limiter.peek(&STREAMS, "ada").await.unwrap().binding().used,
            3
        );

        let one = Limit::concurrent("streams", 3);
        let wide = Limit::per_minute("wide", 100);
        let refused = limiter
            .check_all(check_of([charge(&wide, 1), charge(&one, 1)]))
            .await
            .unwrap();
        assert_eq!(refused.binding().limit.name(), "streams");
        assert_eq!(limiter.peek(&wide, "ada").await.unwrap().binding().used, 0);
    })
    .await;
}

/// Units of the window have left, so more is to be done than to count one more.
#[tokio::test]
async fn a_place_and_a_window_have_figures_of_their_own_in_any_order() {
    on_each_store(async |limiter: Limiter| {
        for (name, place) in [("first", 0), ("second", 1)] {
            let (places, brief) = (Limit::concurrent(name, 4), Limit::per(name, 9, ms(200)));
            let check = || {
                let mut charges = vec![charge(&brief, 1)];
                charges.insert(place, charge(&places, 1));
                check_of(charges)
            };
            let mut held = vec![
                enter(&limiter, &places).await,
                limiter.check_all(check()).await.unwrap(),
            ];
            sleep(ms(300)).await;
            held.push(limiter.check_all(check()).await.unwrap());
            let used: Vec<_> = held[2].statuses().map(|status| status.used).collect();
            assert_eq!(
                (used[place], used[1 - place]),
                (3, 1),
                "the place is {name}"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn an_admission_takes_one_place_whatever_it_costs() {
    on_each_store(async |limiter: Limiter| {
        let dear = Charge::new(STREAMS, "ada", 1_000).unwrap();
        let _held = limiter.check_all(Check::new(dear)).await.unwrap();
        assert_eq!(
            limiter.peek(&STREAMS, "ada").await.unwrap().binding().used,
            1
        );
        let free = limiter.check(&STREAMS, "ada", 0).await.unwrap();
        assert!(free.is_allowed() && !free.holds_place());
    })
    .await;
}

#[tokio::test]
async fn a_caller_waits_until_a_place_is_free() {
    on_each_store(async |limiter: Limiter| {
        let one = Limit::concurrent("one", 1);
        let held = enter(&limiter, &one).await;
        let waiting = tokio::spawn({
            let (limiter, one) = (limiter.clone(), one.clone());
            async move { limiter.acquire(&one, "ada", 1, TEST_TIMEOUT).await.unwrap() }
        });
        sleep(ms(50)).await;
        assert!(!waiting.is_finished());
        let begun = Instant::now();
        drop(held);
        assert!(waiting.await.unwrap().holds_place());
        assert!(
            begun.elapsed() < ms(900),
            "it asks at once, and not when its retry time is over"
        );
        let held = enter(&limiter, &Limit::concurrent("two", 1)).await;
        let two = Limit::concurrent("two", 1);
        let first = tokio::spawn({
            let (limiter, two) = (limiter.clone(), two.clone());
            async move { limiter.acquire(&two, "ada", 1, ms(300)).await.unwrap() }
        });
        sleep(ms(50)).await;
        let second = limiter.acquire(&two, "ada", 1, ms(100)).await.unwrap();
        assert_eq!(
            second.retry_after(),
            Some(seconds(1)),
            "behind another, too"
        );
        assert!(!first.await.unwrap().is_allowed());
        drop(held);
    })
    .await;
}

#[tokio::test]
async fn a_place_in_this_process_is_held_however_long() {
    let clock = tower_sliding_window::store::ManualClock::new();
    let limiter = Limiter::new(MemoryStore::new().clock(&clock));
    let held = [(); 4].map(|()| ());
    let mut places = Vec::new();
    for () in held {
        places.push(enter(&limiter, &STREAMS).await);
    }
    clock.advance(Duration::from_secs(3 * 365 * 24 * 60 * 60));
    assert!(!enter(&limiter, &STREAMS).await.is_allowed());
    clock.step_back(Duration::from_secs(60 * 60));
    assert!(!enter(&limiter, &STREAMS).await.is_allowed());
    places.clear();
    assert_eq!(
        limiter.peek(&STREAMS, "ada").await.unwrap().binding().used,
        0
    );
    assert!(!places.iter().any(Decision::has_lost_place));
}

/// A place is renewed, or has no time: the window beside it tells.
#[tokio::test]
async fn a_repeated_check_has_the_time_of_the_first() {
    on_each_store(async |limiter: Limiter| {
        let window = Limit::per_minute("window", 9);
        let id = tower_sliding_window::check::AdmissionId(9);
        let both = || {
            check_of([
                charge(&STREAMS.freed_after(seconds(1)), 1),
                charge(&window, 1),
            ])
            .with_id(id)
        };
        let first = limiter.check_all(both()).await.unwrap();
        sleep(ms(700)).await;
        assert_eq!(limiter.check_all(both()).await.unwrap().at(), first.at());

        let alone = || Check::new(charge(&STREAMS, 1)).with_id(id);
        let first = limiter.check_all(alone()).await.unwrap();
        let again = limiter.check_all(alone()).await.unwrap();
        assert!(
            again.at() >= first.at() && again.at() <= first.at() + TEST_TIMEOUT,
            "{:?}",
            again.at()
        );
    })
    .await;
}

/// A full store counts other keys together. A place has to be freed, so each has an entry.
#[tokio::test]
async fn places_of_a_full_store_are_freed() {
    let limiter = Limiter::new(MemoryStore::new().capacity(8));
    let mut held = Vec::new();
    for key in 0..100 {
        let decision = limiter
            .check(&STREAMS, format!("key {key}"), 1)
            .await
            .unwrap();
        assert!(decision.is_allowed() && decision.binding().used == 1);
        held.push(decision);
    }
    held.clear();
    for key in 0..100 {
        assert_eq!(
            limiter
                .peek(&STREAMS, format!("key {key}"))
                .await
                .unwrap()
                .binding()
                .used,
            0
        );
    }
}

/// However many are held, another limit keeps its part of the store.
#[tokio::test]
async fn places_take_no_room_from_other_limits() {
    let limiter = Limiter::new(MemoryStore::new().capacity(100));
    let (mut held, once) = (Vec::new(), Limit::per_minute("once", 1));
    for key in 0..1_000 {
        held.push(limiter.check(&STREAMS, key.to_string(), 1).await.unwrap());
    }
    for key in 0..40 {
        assert!(
            limiter
                .check(&once, key.to_string(), 1)
                .await
                .unwrap()
                .is_allowed(),
            "key {key}"
        );
    }
    drop(held);
}

#[test]
fn a_place_in_this_process_is_freed_without_a_runtime() {
    let limiter = Limiter::new(MemoryStore::new());
    let held = one_thread().block_on(enter(&limiter, &STREAMS));
    drop(held);
    assert_eq!(
        one_thread()
            .block_on(limiter.peek(&STREAMS, "ada"))
            .unwrap()
            .binding()
            .used,
        0
    );
}

#[tokio::test]
async fn a_place_of_a_share_is_freed_in_this_process() {
    let store = stores::failing();
    let limiter = Limiter::new(store).fail_local(tower_sliding_window::limiter::Share::one_of(2));
    let held = [
        enter(&limiter, &STREAMS).await,
        enter(&limiter, &STREAMS).await,
    ];
    assert!(held.iter().all(Decision::holds_place));
    assert!(!enter(&limiter, &STREAMS).await.is_allowed());
    drop(held);
    assert!(enter(&limiter, &STREAMS).await.is_allowed());
}

#[test]
fn a_concurrent_limit_is_read_and_written() {
    assert_eq!("streams=4/10s concurrent".parse(), Ok(STREAMS));
    assert_eq!("streams=4 concurrent".parse(), Ok(STREAMS));
    assert_eq!(STREAMS.to_string(), "streams=4/10s concurrent");
    assert_eq!(
        STREAMS.freed_after(seconds(60)).to_string(),
        "streams=4/min concurrent"
    );
    let error = Limit::parse("streams", "4/500ms concurrent")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1 s to 365 days") && error.contains("500ms"),
        "{error}"
    );
    // Shorter than a renewal takes.
    let brief = Limit::per("streams", 4, ms(1)).with_algorithm(STREAMS.algorithm());
    assert_eq!(brief, STREAMS);
}
