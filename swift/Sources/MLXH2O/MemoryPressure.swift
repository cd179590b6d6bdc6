import Dispatch
import Foundation

#if canImport(DispatchMemoryPressure)
    // What Linux's Dispatch lacks.
    import DispatchMemoryPressure
#endif

/// Asks caches in use for less memory; rows that no longer fit go into the remainder, not away.
///
/// Give one to ``H2OConfiguration/pressure`` and call ``lower(to:)`` from wherever the system
/// complains (on iOS `didReceiveMemoryWarning`), or let ``observeSystem()`` do it. Every cache obeys
/// at the beginning of its next step, all layers of a model at the same one.
public final class MemoryPressure: @unchecked Sendable {
    private let lock = NSLock()
    private var wanted = 1.0
    private var agreed = 1.0
    private var agreedAt = -1
    private var source: (any DispatchSourceMemoryPressure)?

    /// No pressure yet.
    public init() {}

    /// Ask for budgets of at most this share of the original ones, from the next step on.
    ///
    /// A policy's sinks and recent tokens stay whatever the share; budgets never grow again.
    public func lower(to share: Double) {
        precondition(share > 0 && share <= 1, "A share is above 0 and at most 1.")
        lock.lock()
        wanted = min(wanted, share)
        lock.unlock()
    }

    /// Lower budgets to a half when the system warns, and to a quarter when memory is critical.
    ///
    /// Once is enough: it goes on for as long as this object lives.
    public func observeSystem() {
        let source = DispatchSource.makeMemoryPressureSource(
            eventMask: [.warning, .critical], queue: .global())
        source.setEventHandler { [weak self] in self?.obeySystem() }
        lock.lock()
        self.source = source
        lock.unlock()
        source.activate()
    }

    private func obeySystem() {
        lock.lock()
        let event: DispatchSource.MemoryPressureEvent = source?.data ?? []
        lock.unlock()
        if event.contains(.critical) {
            lower(to: 0.25)
        } else if event.contains(.warning) {
            lower(to: 0.5)
        }
    }

    /// The share for the step at a position: the first layer's answer holds for all of them, since
    /// one mask serves all layers.
    func share(at offset: Int) -> Double {
        lock.lock()
        defer { lock.unlock() }
        if offset != agreedAt { (agreed, agreedAt) = (wanted, offset) }
        return agreed
    }
}

extension H2OKVCache {
    /// Fewest slots beyond its protected ones that a head keeps under pressure.
    private static let fewestChoices = 4

    /// Obey a lowered share, if there is one.
    func yieldToPressure() {
        guard let pressure, heldStore != nil, let fullBudgets, pending == nil else { return }
        let share = pressure.share(at: offset)
        guard share < pressureShare else { return }
        pressureShare = share
        let least = policy.leastBudget + H2OKVCache.fewestChoices
        let now = budgets!
        let lowered = zip(fullBudgets, now).map { full, now in
            min(now, max(least, Int(Double(full) * share)))
        }
        // The least budget is one that the policy can work with.
        try! resize(lowered)
    }
}
