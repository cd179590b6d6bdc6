import Dispatch
import Foundation

/// A source of the system's complaints about memory.
public protocol DispatchSourceMemoryPressure: DispatchSourceProtocol {}

extension DispatchSource: DispatchSourceMemoryPressure {}

extension DispatchSource {
    public struct MemoryPressureEvent: OptionSet, RawRepresentable, Sendable {
        public let rawValue: UInt
        public init(rawValue: UInt) { self.rawValue = rawValue }

        public static let normal = MemoryPressureEvent(rawValue: 1)
        public static let warning = MemoryPressureEvent(rawValue: 2)
        public static let critical = MemoryPressureEvent(rawValue: 4)
        public static let all: MemoryPressureEvent = [.normal, .warning, .critical]
    }

    /// Linux's Dispatch has no such events; ``simulateMemoryPressure(_:)`` is what fires them. All
    /// else (queue, handlers, activation, data) is Dispatch's own, by a source of user data.
    public class func makeMemoryPressureSource(
        eventMask: MemoryPressureEvent, queue: DispatchQueue? = nil
    ) -> any DispatchSourceMemoryPressure {
        let source = DispatchSource.makeUserDataOrSource(queue: queue) as! DispatchSource
        Observers.all.add(source, eventMask)
        return source
    }

    /// Have every memory-pressure source whose mask has the event run its handler, on its queue.
    public class func simulateMemoryPressure(_ event: MemoryPressureEvent) {
        for source in Observers.all.of(event) {
            (source as any DispatchSourceUserDataOr).or(data: event.rawValue)
        }
    }
}

extension DispatchSourceMemoryPressure {
    /// What happened, inside of the event handler.
    public var data: DispatchSource.MemoryPressureEvent {
        DispatchSource.MemoryPressureEvent(rawValue: (self as! DispatchSource).data)
    }

    public var mask: DispatchSource.MemoryPressureEvent {
        Observers.all.mask(of: self as! DispatchSource)
    }
}

/// The sources that are alive, and what they want to hear of.
private final class Observers: @unchecked Sendable {
    static let all = Observers()

    private struct Observer {
        weak var source: DispatchSource?
        let mask: DispatchSource.MemoryPressureEvent
    }

    private let lock = NSLock()
    private var observers: [Observer] = []

    func add(_ source: DispatchSource, _ mask: DispatchSource.MemoryPressureEvent) {
        lock.withLock {
            observers.removeAll { $0.source == nil }
            observers.append(Observer(source: source, mask: mask))
        }
    }

    func of(_ event: DispatchSource.MemoryPressureEvent) -> [DispatchSource] {
        lock.withLock {
            observers.filter { !$0.mask.isDisjoint(with: event) }.compactMap(\.source)
        }
    }

    func mask(of source: DispatchSource) -> DispatchSource.MemoryPressureEvent {
        lock.withLock { observers.first { $0.source === source }?.mask ?? [] }
    }
}
