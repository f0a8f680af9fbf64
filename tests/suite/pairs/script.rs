//! The script of traffic, the same for each row, and the invariants.
//!
//! Each step has clients of its own, so that steps do not depend on each other. A request that the
//! store has not decided in time is let through by fail-open, on a busy machine at any moment:
//! where one was, a step only compares what holds nevertheless.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
    time::Duration,
};

use futures_util::future::join_all;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep, sleep_until};

use super::{
    app::{App, MAIN, Reply},
    book::{Doing, LASTING, Visit, most_at_once, most_in},
    expected::Lost,
    table::{MAX_WAIT, RESPONDED, SHARE_UNITS, UNITS, WINDOW},
};
use crate::support::{Numbers, ms, seconds};

/// The lines of all failures, and how often each invariant was compared.
#[derive(Default)]
pub(super) struct Report {
    failures: Mutex<Vec<String>>,
    compared: Mutex<BTreeMap<String, u64>>,
}

impl Report {
    pub(super) fn take(self) -> (Vec<String>, BTreeMap<String, u64>) {
        (
            self.failures.into_inner().unwrap(),
            self.compared.into_inner().unwrap(),
        )
    }
}

/// A refusal is given up as known so long after it: the refusal cache remembers it for a second by
/// default.
const KNOWN_FOR: Duration = ms(900);

/// Places are free so long after all is quiet. Their shortest life is much longer.
const FREED_WITHIN: Duration = seconds(3);

/// So many clients leave at once.
const HANG_UPS: u64 = 40;

/// One row on its way through the script.
pub(super) struct Run<'a> {
    pub(super) app: App,
    pub(super) report: &'a Report,
    /// Whose places have to be free in the end.
    clients: Mutex<BTreeSet<String>>,
    /// When the client that has used up the limit was refused.
    known_at: Mutex<Option<Instant>>,
}

impl<'a> Run<'a> {
    pub(super) fn new(app: App, report: &'a Report) -> Self {
        Self {
            app,
            report,
            clients: Mutex::default(),
            known_at: Mutex::default(),
        }
    }

    fn client(&self, name: &str) -> String {
        let client = self.app.client(name);
        self.clients.lock().unwrap().insert(client.clone());
        client
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "short at the many places that call it"
    )]
    fn compare(
        &self,
        step: &str,
        invariant: &str,
        holds: bool,
        expected: impl ToString,
        seen: impl ToString,
    ) {
        *self
            .report
            .compared
            .lock()
            .unwrap()
            .entry(invariant.to_owned())
            .or_default() += 1;
        if !holds {
            let (row, expected, seen) = (&self.app.row, expected.to_string(), seen.to_string());
            let line = format!(
                "seed {} row {} [{}] step '{step}' invariant '{invariant}': expected {expected}, seen {seen}",
                row.seed,
                row.number,
                row.text()
            );
            self.report.failures.lock().unwrap().push(line);
        }
    }

    async fn at_once(&self, client: &str, number: usize, doing: Doing) -> Vec<Reply> {
        join_all((0..number).map(|_| self.app.call(client, doing))).await
    }

    /// The invariants that hold of any client at any time.
    fn check(&self, step: &str, client: &str) -> Vec<Visit> {
        let visits = self.app.book.of(client);
        let decided: Vec<Visit> = visits
            .iter()
            .filter(|visit| visit.said.is_some_and(|said| !said.is_local))
            .cloned()
            .collect();
        if let Some(most) = self.app.most_inside() {
            let seen = most_at_once(&decided);
            self.compare(
                step,
                "no moment above the limit",
                seen <= most,
                format!("at most {most} inside"),
                seen,
            );
        }
        if let Some(most) = self.app.most_in_a_window() {
            let window = self.app.limit.window().min(WINDOW);
            let seen = most_in(window, &decided);
            self.compare(
                step,
                "no window above the limit",
                seen <= most,
                format!("at most {most} in {window:?}"),
                seen,
            );
        }
        visits
    }

    fn check_replies(&self, step: &str, replies: &[Reply], visits: &[Visit]) {
        let handled = replies.iter().filter(|reply| reply.is_handled()).count();
        let invariant = "no refused request reaches the service";
        self.compare(
            step,
            invariant,
            handled == visits.len(),
            format!("{handled} handled"),
            format!("{} visits", visits.len()),
        );
        for reply in replies {
            if self.app.is("show", &["hidden"]) {
                let mut texts = reply
                    .headers
                    .values()
                    .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
                let is_shown = texts.any(|text| text.contains(MAIN))
                    || !reply.is_handled() && reply.body.contains(MAIN);
                self.compare(
                    step,
                    "a hidden limit is not shown",
                    !is_shown,
                    "no name",
                    &reply.body,
                );
            }
            if !reply.is_handled()
                && self.app.is("response", &["respond_with"])
                && !self.app.is("transport", &["gRPC"])
            {
                let is_made = reply.body == RESPONDED;
                self.compare(
                    step,
                    "the responder makes rejections",
                    is_made,
                    RESPONDED,
                    &reply.body,
                );
            }
        }
    }

    /// True if the store has decided all of these, and no other limit has refused one for a place
    /// that is not free yet.
    fn is_sure(&self, visits: &[Visit], replies: &[Reply]) -> bool {
        visits
            .iter()
            .all(|visit| visit.said.is_some_and(|said| !said.is_local))
            && replies.iter().all(|reply| reply.status != 503)
    }

    pub(super) async fn in_order(&self) {
        let used_up_at = self.up_to_the_limit().await;
        tokio::join!(
            self.many_at_once(),
            self.lasting(),
            self.hang_ups(),
            self.upstream(),
            self.by_hand(),
            self.lists()
        );
        self.quiet("quiet").await;
        if let Some(used_up_at) = used_up_at {
            self.a_window_later(used_up_at).await;
        }
    }

    /// When the limit was used up, if it was.
    async fn up_to_the_limit(&self) -> Option<Instant> {
        let (step, client, began) = (
            "up to the limit and beyond",
            self.client("up"),
            Instant::now(),
        );
        let mut replies = Vec::new();
        for _ in 0..2 * UNITS + 1 {
            replies.push(self.app.call(&client, Doing::Reply).await);
        }
        let visits = self.check(step, &client);
        self.check_replies(step, &replies, &visits);
        let is_sure = self.is_sure(&visits, &replies) && began.elapsed() < WINDOW * 9 / 10;
        if !is_sure {
            return None;
        }
        match self.app.admitted() {
            Some(admitted) if self.app.is_exact() && !self.app.has_place() => {
                let seen = visits.len();
                self.compare(
                    step,
                    "an option has its effect: units",
                    seen == admitted,
                    admitted,
                    seen,
                );
            }
            Some(admitted) => {
                let seen = visits.len();
                self.compare(
                    step,
                    "an option has its effect: something is refused",
                    seen < replies.len(),
                    admitted,
                    seen,
                );
            }
            None if !self.app.has_place() => {
                let (seen, all) = (visits.len(), replies.len());
                self.compare(
                    step,
                    "an option has its effect: nothing is refused",
                    seen == all,
                    all,
                    seen,
                );
            }
            None => {}
        }
        self.check_figures(step, &replies);
        self.check_beside(step, &client, visits.len()).await;
        if self.app.has_ban() && self.app.is_used_up() {
            let last = replies.last().unwrap();
            let is_right = last.status == 429 && !last.is_handled();
            self.compare(
                step,
                "an option has its effect: ban",
                is_right,
                429,
                last.status,
            );
        }
        let second = self.client("second");
        let reply = self.app.call(&second, Doing::Reply).await;
        let is_admitted = reply.is_handled() || reply.status == 503;
        self.compare(
            step,
            "a second client is not refused for the first",
            is_admitted,
            200,
            reply.status,
        );
        let is_used_up =
            self.app.is_used_up() && replies.last().is_some_and(|reply| !reply.is_handled());
        is_used_up.then(Instant::now)
    }

    /// The units have left the window, and a ban lasts.
    async fn a_window_later(&self, used_up_at: Instant) {
        let (step, client) = ("a window later", self.client("up"));
        sleep_until(used_up_at + WINDOW * 6 / 5).await;
        let before = self.app.book.of(&client).len();
        let reply = self.app.call(&client, Doing::Reply).await;
        let visits = self.check(step, &client);
        if !self.is_sure(&visits[before..], std::slice::from_ref(&reply)) {
            return;
        }
        if self.app.has_ban() {
            self.compare(
                step,
                "an option has its effect: ban",
                !reply.is_handled(),
                "refused",
                reply.status,
            );
        } else if self.app.is_exact() {
            self.compare(
                step,
                "a window ends",
                reply.is_handled(),
                "admitted",
                reply.status,
            );
        }
    }

    /// The figures of headers agree with the handler's count.
    fn check_figures(&self, step: &str, replies: &[Reply]) {
        let shows = self.app.is_visible()
            && self.app.is_exact()
            && !self.app.is_alone()
            && !self.app.is("stack", &["in front of another layer"]);
        let has_figures = shows
            && !self.app.has_place()
            && !self.app.heeds()
            && !self.app.is("response", &["headers=none"]);
        if self.app.is("response", &["headers=none"])
            && self.app.is("stack", &["alone"])
            && !self.app.is_alone()
        {
            let shown = replies
                .iter()
                .filter(|reply| reply.headers.contains_key("x-ratelimit-limit"))
                .count();
            self.compare(
                step,
                "an option has its effect: no headers",
                shown == 0,
                0,
                shown,
            );
        }
        if self.app.is("response", &["headers=both"]) && has_figures {
            let shown = replies
                .iter()
                .filter(|reply| reply.headers.contains_key("ratelimit"))
                .count();
            self.compare(
                step,
                "an option has its effect: RateLimit",
                shown == replies.len(),
                replies.len(),
                shown,
            );
        }
        let Some(admitted) = self.app.admitted().filter(|_| has_figures) else {
            return;
        };
        let cost = UNITS as usize / admitted;
        for (number, reply) in replies.iter().take(admitted).enumerate() {
            let left = UNITS as usize - cost * (number + 1);
            let seen = reply
                .headers
                .get("x-ratelimit-remaining")
                .map(|value| value.to_str().unwrap().to_owned());
            self.compare(
                step,
                "figures agree with the count",
                seen == Some(left.to_string()),
                left,
                format!("{seen:?}"),
            );
        }
    }

    /// What a refused request has counted under another key is given back in the background.
    async fn check_beside(&self, step: &str, client: &str, admitted: usize) {
        let has_layer = !self.app.is_alone();
        let cost = if has_layer && self.app.is("charge", &["a layer's cost of 2"]) {
            2
        } else {
            1
        };
        let (expected, began) = (Some(cost * admitted as u64), Instant::now());
        let mut used = self.app.used_beside(client).await;
        while used > expected && began.elapsed() < FREED_WITHIN {
            sleep(ms(5)).await;
            used = self.app.used_beside(client).await;
        }
        if used.is_some() {
            self.compare(
                step,
                "a refusal takes nothing from another key",
                used == expected,
                format!("{expected:?}"),
                format!("{used:?}"),
            );
        }
    }

    async fn many_at_once(&self) {
        let (step, client) = ("many at once", self.client("many"));
        let replies = self
            .at_once(&client, 3 * UNITS as usize, Doing::ReplyLate)
            .await;
        let visits = self.check(step, &client);
        self.check_replies(step, &replies, &visits);
        if self.app.is_shadow() && !self.app.has_place() {
            self.compare(
                step,
                "a limit in the shadow refuses nothing",
                visits.len() == replies.len(),
                replies.len(),
                visits.len(),
            );
        }
    }

    async fn lasting(&self) {
        for (step, name, doing) in [
            ("streamed bodies", "streams", Doing::Stream),
            ("kept decisions", "kept", Doing::KeepDecision),
        ] {
            let client = self.client(name);
            let replies = self.at_once(&client, 3 * UNITS as usize, doing).await;
            sleep(LASTING).await;
            let visits = self.check(step, &client);
            self.check_replies(step, &replies, &visits);
        }
    }

    async fn hang_ups(&self) {
        let mut numbers = Numbers(self.app.row.seed ^ self.app.row.number as u64);
        for (step, name, from, to) in [
            ("hang-ups at once", "hang-at-once", 0, 20_000),
            ("hang-ups before the reply", "hang-before", 60_000, 100_000),
        ] {
            let client = self.client(name);
            // Few of those that leave at once are on their way to the store just then.
            let calls = (0..if from == 0 { HANG_UPS } else { UNITS }).map(|_| {
                let after = Duration::from_micros(from + numbers.below(to - from));
                self.app.call_and_leave(&client, Doing::ReplyLate, after)
            });
            drop(join_all(calls.collect::<Vec<_>>()).await);
            self.check(step, &client);
        }
        let client = self.client("hang-body");
        let open = (0..UNITS).map(|_| async {
            let mut response = self.app.open(&client, Doing::Stream, &[]).await;
            drop(response.body_mut().frame().await);
        });
        join_all(open).await;
        self.check("hang-ups in the body", &client);
    }

    /// Costs that are known afterwards, and an upstream that refuses.
    async fn upstream(&self) {
        if self.app.knows_costs_afterwards() && !self.app.has_place() {
            let (step, client) = ("free requests", self.client("free"));
            let mut replies = Vec::new();
            for _ in 0..2 * UNITS {
                replies.push(self.app.call(&client, Doing::ReplyFree).await);
            }
            let handled = replies.iter().filter(|reply| reply.is_handled()).count();
            let is_right = handled == replies.len()
                || replies.iter().any(|reply| reply.status == 503)
                || !self.app.is_exact();
            self.compare(
                step,
                "an option has its effect: a free request costs nothing",
                is_right,
                replies.len(),
                handled,
            );
        }
        if self.app.heeds() {
            let (step, client) = ("an upstream that refuses", self.client("upstream"));
            self.app.call(&client, Doing::Refuse).await;
            let first = self.app.book.of(&client);
            let replies = self.at_once(&client, 3, Doing::Reply).await;
            let visits = self.check(step, &client);
            if self.is_sure(&visits, &replies) && first.len() == 1 && self.app.blocks_in_full() {
                let seen = visits.len() - 1;
                self.compare(
                    step,
                    "an option has its effect: heed_upstream",
                    seen == 0,
                    "0 calls go out",
                    seen,
                );
            }
        }
    }

    /// A block and a reset.
    async fn by_hand(&self) {
        let (step, client) = ("a block", self.client("block"));
        if self.app.blocks_in_full() && self.app.block(&client, WINDOW).await {
            let replies = self.at_once(&client, 3, Doing::Reply).await;
            let visits = self.check(step, &client);
            if self.is_sure(&visits, &replies) {
                self.compare(
                    step,
                    "block blocks",
                    visits.is_empty(),
                    "0 admitted",
                    visits.len(),
                );
            }
        }
        // In another store they are counted again with their next renewal.
        if self.app.has_place() && self.app.is("store", &["memory"]) {
            let (step, client) = ("a reset while places are held", self.client("reset"));
            let held = self.at_once(&client, UNITS as usize, Doing::Stream);
            let reset = async {
                let began = Instant::now();
                while self.app.book.of(&client).is_empty() && began.elapsed() < LASTING {
                    sleep(ms(5)).await;
                }
                self.app.reset_places(&client).await;
                self.at_once(&client, UNITS as usize, Doing::Stream).await
            };
            tokio::join!(held, reset);
            self.check(step, &client);
        } else if self.app.is_used_up() && !self.app.has_place() {
            let (step, client) = ("a reset", self.client("reset"));
            while self.app.call(&client, Doing::Reply).await.is_handled()
                && self.app.book.of(&client).len() < 20
            {}
            let (before, was_reset) = (
                self.app.book.of(&client).len(),
                self.app.reset(&client).await,
            );
            let reply = self.app.call(&client, Doing::Reply).await;
            let visits = self.app.book.of(&client);
            if was_reset && self.is_sure(&visits[before..], std::slice::from_ref(&reply)) {
                self.compare(
                    step,
                    "reset forgets",
                    reply.is_handled(),
                    "admitted",
                    reply.status,
                );
            }
        }
    }

    async fn lists(&self) {
        let (step, client) = ("lists", self.client("listed"));
        let mut replies = Vec::new();
        if self.app.is(
            "list",
            &["exempt a path", "exempt a key", "exempt addresses"],
        ) {
            for _ in 0..2 * UNITS {
                replies.push(self.app.call_listed(&client).await);
            }
            let seen = replies.iter().filter(|reply| reply.is_handled()).count();
            self.compare(
                step,
                "an option has its effect: uncounted",
                seen == replies.len(),
                replies.len(),
                seen,
            );
        } else if self
            .app
            .is("list", &["deny a path", "deny a key", "deny addresses"])
        {
            replies.push(self.app.call_listed(&client).await);
            let is_denied = replies[0].status == 403 && !replies[0].is_handled();
            self.compare(
                step,
                "an option has its effect: denied",
                is_denied,
                403,
                replies[0].status,
            );
        }
    }

    /// A pause of the store is longer than the deadlines. Some clients wait, some hang up
    /// meanwhile.
    pub(super) async fn while_paused(&self) {
        let (waits, leaves) = (self.client("paused"), self.client("paused-hang"));
        let waiting = self.at_once(&waits, UNITS as usize, Doing::Reply);
        let leaving =
            join_all((0..UNITS).map(|_| self.app.call_and_leave(&leaves, Doing::Reply, ms(60))));
        let (replies, _) = tokio::join!(waiting, leaving);
        let visits = self.check("a pause of the store", &waits);
        self.check_replies("a pause of the store", &replies, &visits);
    }

    /// Once the store answers again, a breaker is closed soon.
    pub(super) async fn recover(&self) {
        let client = self.client("second");
        let began = Instant::now();
        while self.app.held(&client).await.is_none() {
            if began.elapsed() > seconds(10) {
                self.compare(
                    "the store is back",
                    "decisions are back",
                    false,
                    "within 10 s",
                    "none",
                );
                return;
            }
            sleep(ms(50)).await;
        }
    }

    /// Uses up the limit, so that this process knows a refusal, or the ban. Others go on meanwhile.
    pub(super) async fn before_the_loss(&self) {
        let (known, other) = (self.client("known"), self.client("other"));
        if !self.app.is_used_up() {
            return;
        }
        let mut refused = 0;
        for _ in 0..3 * UNITS {
            let asked = Instant::now();
            let reply = self.app.call(&known, Doing::Reply).await;
            let is_refused = !reply.is_handled() && reply.status != 503;
            if !is_refused || self.app.counts_afterwards() {
                refused = 0;
                continue;
            }
            refused += 1;
            // A place may have refused instead: it is free in a moment.
            if self.app.has_place() && refused == 1 {
                sleep(ms(50)).await;
                continue;
            }
            *self.known_at.lock().unwrap() = Some(asked);
            break;
        }
        self.app.call(&other, Doing::ReplyFree).await;
        self.app.call(&other, Doing::Reply).await;
    }

    pub(super) async fn while_lost(&self) {
        let (known, fresh) = (self.client("known"), self.client("fresh"));
        let step = "a loss of the store";
        let before = self.app.book.of(&known).len();
        let known_at = *self.known_at.lock().unwrap();
        let replies = self.at_once(&known, 2 * UNITS as usize, Doing::Reply).await;
        let is_known = known_at.is_some_and(|at| at.elapsed() < KNOWN_FOR);
        if is_known && self.app.remembers() && self.app.refuses_for_long() {
            let seen = self.app.book.of(&known).len() - before;
            self.compare(
                step,
                "a known refusal stands",
                seen == 0,
                "0 admitted",
                format!("{seen} of {}", replies.len()),
            );
        }
        let replies = self.at_once(&fresh, self.app.fitting(), Doing::Reply).await;
        let visits = self.check(step, &fresh);
        self.check_replies(step, &replies, &visits);
        let local = visits
            .iter()
            .filter(|visit| visit.said.is_some_and(|said| said.is_local))
            .count();
        match self.app.when_lost() {
            Lost::Open => {
                let seen = visits.len();
                self.compare(
                    step,
                    "fail-open is open to the unknown",
                    seen == replies.len(),
                    replies.len(),
                    seen,
                );
            }
            Lost::Closed => self.compare(
                step,
                "fail-closed is closed",
                visits.is_empty(),
                0,
                visits.len(),
            ),
            Lost::Local if self.app.admitted().is_some() && !self.app.counts_afterwards() => {
                self.compare(
                    step,
                    "fail-local admits its share",
                    local <= SHARE_UNITS,
                    SHARE_UNITS,
                    local,
                );
            }
            Lost::Local => {}
        }
    }

    /// Nothing is held when all is quiet.
    pub(super) async fn quiet(&self, step: &str) {
        if !self.app.has_place() {
            return;
        }
        sleep(MAX_WAIT.max(LASTING)).await;
        let clients = self.clients.lock().unwrap().clone();
        let began = Instant::now();
        for client in clients {
            let mut held = self.app.held(&client).await;
            // Without an answer nothing is known yet.
            let patience = |held: Option<u64>| {
                if held.is_none() {
                    FREED_WITHIN * 2
                } else {
                    FREED_WITHIN
                }
            };
            while held != Some(0) && began.elapsed() < patience(held) {
                sleep(ms(50)).await;
                held = self.app.held(&client).await;
            }
            let name = client.splitn(3, '-').last().unwrap_or_default();
            self.compare(
                step,
                "nothing is held when all is quiet",
                held == Some(0),
                "0 places",
                format!("{held:?} of '{name}'"),
            );
        }
        self.clients.lock().unwrap().clear();
    }
}
