@MainActor @preconcurrency public protocol Scene {}

public struct WindowGroup: Scene {
    public init(@ViewBuilder content: () -> Content) {}
}

@resultBuilder public enum SceneBuilder {
    public static func buildBlock<S: Scene>(_ scene: S) -> S { scene }
}

@MainActor @preconcurrency public protocol App {
    associatedtype Body: Scene
    @SceneBuilder @MainActor var body: Body { get }
    init()
}

extension App {
    public static func main() {}
}

@propertyWrapper public struct Binding<Value> {
    public var wrappedValue: Value

    public init(wrappedValue: Value) { self.wrappedValue = wrappedValue }
}

@propertyWrapper public struct State<Value> {
    public var wrappedValue: Value {
        get { value }
        nonmutating set {}
    }
    private let value: Value

    public init(wrappedValue: Value) { value = wrappedValue }

    public var projectedValue: Binding<Value> { Binding(wrappedValue: value) }
}

public enum ScenePhase { case active, inactive, background }

public struct EnvironmentValues {
    public var scenePhase: ScenePhase { .active }
}

@propertyWrapper public struct Environment<Value> {
    public let wrappedValue: Value

    public init(_ path: KeyPath<EnvironmentValues, Value>) {
        wrappedValue = EnvironmentValues()[keyPath: path]
    }
}
