import Dispatch
import Foundation

#if canImport(DispatchMemoryPressure)
    // What Linux's Dispatch lacks.
    import DispatchMemoryPressure
#endif

/// Asks caches in use for less memory; rows that no longer fit go into the remainder, not away.
///
/// Give one to ``H2OConfiguration/pressure`` and call ``lower(toFraction:)`` from wherever the system
/// complains (on iOS `didReceiveMemoryWarning`), or let ``observeSystem()`` do it. Every cache obeys
/// at the beginning of its next step, all layers of a model at the same one; new conversations start
/// with the lowered budgets, until ``end()``.
public final class H2OMemoryPressure: @unchecked Sendable {
    // What to lower budgets to when the system warns, and when memory is critical.
    private static let warningFraction = 0.5
    private static let criticalFraction = 0.25

    private let lock = NSLock()
    private var wanted = 1.0
    private var source: (any DispatchSourceMemoryPressure)?
    /// Of caches that were not made together for a model.
    let agreement = PressureAgreement()

    /// No pressure yet.
    public init() {}

    /// The fraction of the original budgets that is asked for now.
    public var fraction: Double { lock.withLock { wanted } }

    /// Ask for budgets of at most this fraction of the original ones, from the next step on.
    ///
    /// A policy's sinks and recent tokens stay whatever the fraction.
    ///
    /// - Parameter fraction: Above 0 and at most 1.
    /// - Throws: ``H2OError/configuration(_:)`` for any other number.
    public func lower(toFraction fraction: Double) throws {
        guard fraction > 0 && fraction <= 1 else {
            throw H2OError.configuration(
                "lower(toFraction:) takes a fraction of the budgets, above 0 and at most 1; got "
                    + "\(fraction).")
        }
        lower(to: fraction)
    }

    /// The pressure is over: new conversations have their whole budgets again. Those in use keep the
    /// lowered ones, since what they gave away has gone into the remainder.
    public func end() { lock.withLock { wanted = 1 } }

    /// Lower budgets to a half when the system warns, to a quarter when memory is critical, and
    /// ``end()`` when it is back to normal.
    ///
    /// Once is enough: it goes on for as long as this object lives.
    public func observeSystem() {
        let source = DispatchSource.makeMemoryPressureSource(
            eventMask: [.normal, .warning, .critical], queue: .global())
        source.setEventHandler { [weak self] in self?.obeySystem() }
        lock.withLock { self.source = source }
        source.activate()
    }

    private func obeySystem() {
        let event: DispatchSource.MemoryPressureEvent = lock.withLock { source?.data ?? [] }
        if event.contains(.critical) {
            lower(to: Self.criticalFraction)
        } else if event.contains(.warning) {
            lower(to: Self.warningFraction)
        } else if event.contains(.normal) {
            end()
        }
    }

    private func lower(to fraction: Double) {
        lock.withLock { wanted = min(wanted, fraction) }
    }
}

/// What the layers of one conversation obey: the first layer's answer at a position holds for all of
/// them, since one mask serves all layers.
final class PressureAgreement: @unchecked Sendable {
    // Copies of a conversation share its agreement, and each is somewhere else.
    private static let mostPositions = 8

    private let lock = NSLock()
    private var agreed: [(offset: Int, fraction: Double)] = []

    /// The fraction for the step at a position.
    func fraction(at offset: Int, of pressure: H2OMemoryPressure) -> Double {
        lock.lock()
        defer { lock.unlock() }
        if let known = agreed.first(where: { $0.offset == offset }) { return known.fraction }
        if agreed.count == Self.mostPositions { agreed.removeFirst() }
        agreed.append((offset, pressure.fraction))
        return agreed.last!.fraction
    }
}

/// What memory pressure asks of one cache, and what that has given.
struct PressureShare {
    private let pressure: H2OMemoryPressure?
    /// Shared by the caches of a conversation.
    private let agreement: PressureAgreement?
    /// The fraction of its budgets that the cache has.
    private var fraction = 1.0
    /// Slots of each head without pressure, once known.
    private(set) var full: SlotPlan?

    /// - Parameters:
    ///   - pressure: What may ask for less memory.
    ///   - agreement: Of the caches of a conversation; nil for caches that were not made together.
    init(_ pressure: H2OMemoryPressure?, _ agreement: PressureAgreement?) {
        self.pressure = pressure
        self.agreement = agreement ?? pressure?.agreement
    }

    /// Note the budgets of a cache that was saved; nil of one that begins anew.
    mutating func adopt(_ plan: SlotPlan?) { (full, fraction) = (plan, 1) }

    /// Budgets for the step that begins, or nil where no less is asked for than before.
    ///
    /// - Parameters:
    ///   - now: Slots of each head, and those that follow; of a first step those without pressure.
    ///   - offset: The step's position.
    ///   - fewest: Slots that pressure leaves to a head.
    mutating func lowered(
        _ now: @autoclosure () -> SlotPlan, at offset: Int, fewest: @autoclosure () -> Int
    ) -> SlotPlan? {
        let now = full == nil || pressure != nil ? now() : nil
        full = full ?? now
        guard let pressure, let agreement, let full, let now else { return nil }
        let wanted = agreement.fraction(at: offset, of: pressure)
        guard wanted < fraction else { return nil }
        fraction = wanted
        return full.left(now.later.count).lowered(to: wanted, fewest: fewest()).capped(by: now)
    }
}
