import MLX

/// A wrapped property of a module: it may have another name in the weights.
protocol NamedProperty {
    var key: String? { get }
    var current: Any? { get }
}

/// One that can be replaced.
protocol ModuleProperty: NamedProperty {
    func set(_ module: Module) throws
}

/// A child that has its own name in the weights, or that may be replaced (by a quantized twin).
@propertyWrapper public class ModuleInfo<T>: ModuleProperty {
    private var value: T?
    let key: String?

    public init(wrappedValue: T, key: String? = nil) {
        value = wrappedValue
        self.key = key
    }

    public init(key: String? = nil) { self.key = key }

    /// Set once, in the module's initializer; after that by the module's `update`.
    public var wrappedValue: T {
        get { value! }
        set {
            precondition(current == nil, "please use update(...) of the module")
            value = newValue
        }
    }

    var current: Any? { unwrapped(value) }

    func set(_ module: Module) throws {
        guard let module = module as? T else {
            throw UpdateError.needModuleInfo("\(type(of: module)) is no \(T.self)")
        }
        value = module
    }
}

extension ModuleInfo where T: ExpressibleByNilLiteral {
    /// An optional child starts as nil.
    public convenience init(key: String? = nil) { self.init(wrappedValue: nil, key: key) }
}

/// A parameter that has its own name in the weights.
@propertyWrapper public class ParameterInfo<T>: NamedProperty {
    private var value: T?
    let key: String?

    public init(wrappedValue: T, key: String? = nil) {
        value = wrappedValue
        self.key = key
    }

    public init(key: String? = nil) { self.key = key }

    /// Set once, in the module's initializer; after that by the module's `update`.
    public var wrappedValue: T {
        get { value! }
        set {
            precondition(current == nil, "please use update(...) of the module")
            value = newValue
        }
    }

    var current: Any? { unwrapped(value) }
}

/// The value inside any depth of optionals.
private func unwrapped(_ value: Any?) -> Any? {
    guard let value else { return nil }
    let mirror = Mirror(reflecting: value)
    guard mirror.displayStyle == .optional else { return value }
    return unwrapped(mirror.children.first?.value)
}
